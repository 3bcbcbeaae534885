"""What a quantisation method says of a linear layer, and how weights are treated that are not quantised."""

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
    """Which part of a linear layer a rank holds: some rows of each sub-layer, one after the other, some columns."""

    sub_layers: tuple[SubLayer, ...]
    rows: tuple[ShardRange, ...]  # of each sub-layer
    columns: ShardRange
    in_axis: str | None  # the logical axis of the columns

    @property
    def out_size(self) -> int:
        """O, of all sub-layers together on this rank."""
        return sum(rows.size for rows in self.rows)

    @property
    def in_size(self) -> int:
        """I, on this rank."""
        return self.columns.size


class QuantizationMethod(Protocol):
    """How the weight of a linear layer is read from a checkpoint, prepared and multiplied.

    The parameters are attributes of the `layer`, which has nothing of its own but a bias. One object serves all layers
    of a model.
    """

    def allocate(self, layer: nn.Module, layout: LinearLayout) -> None:
        """Give the layer its parameters, made with `parameter`; again when it is cut or gets new weights."""
        ...

    def shards(self, layer: nn.Module, layout: LinearLayout) -> Iterator[Shard]:
        """Which tensors of the checkpoint fill those parameters; once prepared, only their names and shapes count."""
        ...

    def prepare(self, layer: nn.Module, kernels: Kernels) -> None:
        """Replace the filled parameters by what `multiply` takes."""
        ...

    def multiply(self, layer: nn.Module, x: Tensor, bias: Tensor | None, kernels: Kernels) -> Tensor:
        """x [T, I] -> x @ weight.T + bias, [T, O]."""
        ...

    def prepare_weight(self, weight: Tensor, kernels: Kernels) -> Tensor:
        """A plain weight [O, I] as `Kernels.linear` and `Kernels.logits` take it: that of an LM head, for one."""
        ...

    def prepare_experts(self, mixture: Mixture, kernels: Kernels) -> Mixture:
        """The plain weights of a mixture's experts as `Kernels.mix` takes them."""
        ...

    def keeps(self, layout: LinearLayout) -> bool:
        """Whether experts of this layout stay in the groups that the checkpoint has them in; then `take` gives them."""
        ...

    def take(self, layer: nn.Module) -> GroupedWeight:
        """What `allocate` made and the checkpoint has filled; the layer is left without it."""
        ...


class Unquantized:
    """Weights in the model's dtype, in the layout that products want."""

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

    def take(self, layer: nn.Module) -> GroupedWeight:
        raise RuntimeError("Nothing is kept in groups.")


def _weight(layer: nn.Module) -> Tensor:
    weight = layer.weight
    if not isinstance(weight, Tensor):
        raise TypeError(f"The weight of a {type(layer).__name__} is no tensor.")
    return weight
