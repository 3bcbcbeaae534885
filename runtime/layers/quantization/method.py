"""Interface of quantisation methods, and the method for unquantised weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

from torch import Tensor, nn

from ops.matmul.grouped import GroupedWeight
from ops.moe import Mixture
from ops.select import Kernels
from runtime.layers.sharding import ShardRange
from runtime.layers.weight import Shard, SubLayer, frozen, parameter


class LinearLayout(NamedTuple):
    """The part of a linear layer that a rank holds: a range of rows of each sub-layer, and one range of columns."""

    sub_layers: tuple[SubLayer, ...]
    rows: tuple[ShardRange, ...]  # one range per sub-layer
    columns: ShardRange
    in_axis: str | None  # logical axis of the columns; None: never split

    @property
    def out_size(self) -> int:
        """O, the number of rows of all sub-layers on this rank."""
        return sum(rows.size for rows in self.rows)

    @property
    def in_size(self) -> int:
        """I, the number of columns on this rank."""
        return self.columns.size


class QuantizationMethod(Protocol):
    """Reads, prepares and multiplies the weights of linear layers.

    A method stores a layer's parameters as attributes of the `layer`. One method object serves all layers of a model.
    """

    def allocate(self, layer: nn.Module, layout: LinearLayout) -> None:
        """Create the layer's parameters with `parameter`. Called again after a split, and before new weights load."""
        ...

    def shards(self, layer: nn.Module, layout: LinearLayout) -> Iterator[Shard]:
        """Yield the shards that fill the parameters. After `prepare` only their names and shapes are valid."""
        ...

    def prepare(self, layer: nn.Module, kernels: Kernels) -> None:
        """Replace the filled parameters by a weight in the layout that `multiply` needs."""
        ...

    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        """Return x @ weight.T + bias, [T, I] -> [T, O]."""
        ...

    def prepare_weight(self, weight: Tensor, kernels: Kernels) -> Tensor:
        """Prepare an unquantised weight [O, I], such as an LM head's, for `Kernels.linear` and `Kernels.logits`."""
        ...

    def prepare_experts(self, mixture: Mixture, kernels: Kernels) -> Mixture:
        """Prepare the unquantised weights of a mixture's experts for `Kernels.mix`."""
        ...

    def keeps(self, layout: LinearLayout) -> bool:
        """Whether the weight of an embedding or LM head stays quantised as in the checkpoint."""
        ...

    def keeps_experts(self, layout: LinearLayout) -> bool:
        """Whether a weight of experts stays quantised as in the checkpoint. If so, `take` returns it."""
        ...

    def take(self, layer: nn.Module) -> GroupedWeight:
        """Return the layer's grouped weight after the checkpoint has filled it, and remove it from the layer."""
        ...


class Unquantized:
    """Weights in the model's dtype, in the layout of the matmul kernels."""

    def allocate(self, layer: nn.Module, layout: LinearLayout) -> None:
        layer.weight = parameter(layout.out_size, layout.in_size)  # [O, I]

    def shards(self, layer: nn.Module, layout: LinearLayout) -> Iterator[Shard]:
        row, columns = 0, layout.columns
        for sub_layer, rows in zip(layout.sub_layers, layout.rows, strict=True):
            name, axes = f"{sub_layer.name}.weight", (sub_layer.axis, layout.in_axis)
            for first, part in sub_layer.pieces(rows):
                shard = Shard(name, _weight(layer), row + first, part.size, axes, (part, columns))
                yield shard._replace(transposed=sub_layer.transposed)
            row += rows.size

    def prepare(self, layer: nn.Module, kernels: Kernels) -> None:
        layer.weight = frozen(self.prepare_weight(_weight(layer), kernels))

    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        return kernels.linear(x, layer.weight, bias)

    def prepare_weight(self, weight: Tensor, kernels: Kernels) -> Tensor:
        return kernels.prepare(weight)

    def prepare_experts(self, mixture: Mixture, kernels: Kernels) -> Mixture:
        return kernels.prepare_experts(mixture)

    def keeps(self, layout: LinearLayout) -> bool:
        return False

    def keeps_experts(self, layout: LinearLayout) -> bool:
        return False

    def take(self, layer: nn.Module) -> GroupedWeight:
        raise RuntimeError("An unquantised layer has no weight in groups.")


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    if not isinstance(weight, Tensor):
        raise TypeError(f"The weight of a {type(layer).__name__} is not a tensor.")
    return weight
