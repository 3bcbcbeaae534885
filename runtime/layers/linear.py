"""Linear layers that fuse several of a model's projections into one matrix product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.matmul.nvfp4 import exact_input
from runtime.batch import ADAPTER
from runtime.layers.build import Build
from runtime.layers.forward_batch import ForwardBatch
from runtime.layers.low_rank import LowRankSlots
from runtime.layers.quantization import LinearLayout, Unquantized
from runtime.layers.sharding import ShardRange, TensorParallelGroup, shard_range, whole_range
from runtime.layers.weight import Shard, SubLayer, Weighted, parameter

SQUARED_COLUMNS = 256  # number of weight columns that `squares` dequantises at a time


class Linear(Weighted):
    """Maps x [T, I] to the concatenated outputs [T, O] of the sub-layers.

    The model's quantisation method reads, prepares and multiplies the weight. `quantized=False` keeps full precision.
    If the layer is split along its output, it returns this rank's shard of each sub-layer. If it is split along its
    input, it takes this rank's shard of x and returns the sum over all ranks.
    """

    row_values: tuple[str, ...] = ()  # names of the row values that `forward` reads

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
        self.adapters: LowRankSlots | None = None  # None: adapters cannot change this layer
        self._summed_over: TensorParallelGroup | None = None
        # If this layer rounds its input to float8: number of inputs per scale, so that the operation before this layer
        # can do the rounding. Otherwise None.
        self.row_group: int | None = None
        self.allocate()

    def allocate(self) -> None:
        """Create this rank's parameters for the checkpoint to fill."""
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
        self.row_group = self.kernels.row_group(self.get_parameter("weight"))

    def take_adapters(self, slots: LowRankSlots) -> None:
        """Apply the adapters in these slots to the output, for rows of the batch that name an adapter."""
        self.adapters, self.row_values = slots, (ADAPTER,)

    def squares(self, a: Tensor, b: Tensor, device: torch.device) -> Tensor:
        """Return the squared norms of the rows of W + b a (DoRA), float32 [O], summed over the ranks' input shards.

        `a` [P, r, I] and `b` [r, O] are this rank's shard of an adapter (see `AdapterPart`), in the model's dtype. All
        ranks must call this method together.
        """
        a, b, dtype = a.to(device).float(), b.to(device).float(), a.dtype
        total, size = a.new_zeros(b.shape[1]), exact_input(self.get_parameter("weight"))
        for first in range(0, self.layout.in_size, SQUARED_COLUMNS):
            columns = torch.arange(first, min(first + SQUARED_COLUMNS, self.layout.in_size), device=a.device)
            unit = (F.one_hot(columns, self.layout.in_size) * size).to(dtype)
            # The product with unit vectors reads columns of a weight in any format.
            weight = self.method.multiply(self, unit, None, self.kernels).float() / size  # [n, O]
            row = 0
            for part, rows in enumerate(self.layout.rows):
                outputs = slice(row, row + rows.size)
                weight[:, outputs] += a[part][:, columns].T @ b[:, outputs]
                row += rows.size
            total += weight.square().sum(0)
        return total if self._summed_over is None else self._summed_over.all_reduce(total)

    def forward(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        group = self._summed_over
        bias = self.bias if group is None or group.rank == 0 else None
        out = self.method.multiply(self, x, bias, self.kernels)
        if self.adapters is not None:
            self.adapters.add(out, x, bias, batch)
        return out if group is None else group.all_reduce(out)

    def logits(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Return the output in float32 if the kernels can compute it, otherwise in the dtype of x.

        The layer must be whole and in full precision, and must not have a bias.
        """
        out = self.kernels.logits(x, self.get_parameter("weight"))
        if self.adapters is not None:
            self.adapters.add(out, x, None, batch)
        return out


def from_heads(name: str, num_heads: int, head_dim: int, size: int, build: Build, *, bias: bool) -> Linear:
    """Return the output projection of attention, [T, H * D] -> [T, size], split at head boundaries."""
    parts = [SubLayer(name, size)]
    return Linear(num_heads * head_dim, parts, build, bias=bias, in_axis="heads", in_unit=head_dim)
