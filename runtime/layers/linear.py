"""Linear layers, several of a model's in one product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from runtime.layers.build import Build
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.quantization import LinearLayout, Unquantized
from runtime.layers.sharding import ShardRange, TensorParallelGroup, shard_range, whole_range
from runtime.layers.weight import Shard, SubLayer, Weighted, parameter


class Linear(Weighted):
    """x [T, I] -> [T, sum of the sub-layers' sizes]: their outputs one after the other.

    The weight belongs to the model's quantisation method: how it is read, prepared and multiplied. It stays in full
    precision with `quantized=False`. Cut along its output, the layer gives this rank's share of each sub-layer; cut
    along its input, it takes this rank's share of x and gives the sum over all ranks.
    """

    def __init__(
        self,
        in_size: int,
        sub_layers: Sequence[SubLayer],
        build: Build,
        *,
        bias: bool = False,
        in_axis: str | None = None,
        in_unit: int = 1,
        quantized: bool = True,
    ) -> None:
        super().__init__()
        self.kernels = build.kernels
        self.method = build.quantization if quantized else Unquantized()
        self.in_unit = in_unit
        rows = tuple(whole_range(each.size) for each in sub_layers)
        self.layout = LinearLayout(tuple(sub_layers), rows, whole_range(in_size), in_axis)
        self.has_bias = bias
        self._summed_over: TensorParallelGroup | None = None
        self.allocate()

    def allocate(self) -> None:
        """Make this rank's parameters, to be filled."""
        self.method.allocate(self, self.layout)
        self.bias = parameter(self.layout.out_size) if self.has_bias else None

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's rows of each sub-layer and this rank's columns."""

        def share(axis: str | None, size: int, unit: int) -> ShardRange:
            return shard_range(axis, size, unit, group.rank, group.size)

        sub_layers, in_axis = self.layout.sub_layers, self.layout.in_axis
        rows = tuple(share(each.axis, each.size, each.unit) for each in sub_layers)
        columns = share(in_axis, self.layout.columns.full, self.in_unit)
        self.layout = LinearLayout(sub_layers, rows, columns, in_axis)
        self.allocate()
        if not columns.whole:
            self._summed_over = group

    def shards(self) -> Iterator[Shard]:
        yield from self.method.shards(self, self.layout)
        if self.bias is None:
            return
        row = 0
        for sub_layer, rows in zip(self.layout.sub_layers, self.layout.rows, strict=True):
            for first, part in sub_layer.pieces(rows):
                name, axes = f"{sub_layer.name}.bias", (sub_layer.axis,)
                yield Shard(name, self.bias, row + first, part.size, axes, (part,))
            row += rows.size

    def prepare(self) -> None:
        self.method.prepare(self, self.kernels)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        group = self._summed_over
        if group is None:
            return self.method.multiply(self, x, self.bias, self.kernels)
        bias = self.bias if group.rank == 0 else None
        return group.all_reduce(self.method.multiply(self, x, bias, self.kernels))


def from_heads(name: str, num_heads: int, head_dim: int, size: int, build: Build, *, bias: bool) -> Linear:
    """The projection of heads' outputs [T, H * D] -> [T, size], which is cut between heads."""
    parts = [SubLayer(name, size)]
    return Linear(num_heads * head_dim, parts, build, bias=bias, in_axis="heads", in_unit=head_dim)
