"""The mapping from the tensors of a checkpoint to the parameters of layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from runtime.layers.sharding import ShardRange, TensorParallelGroup, whole_range

Axes = tuple[str | None, ...]


class Shard(NamedTuple):
    """Some rows of a parameter, and the part of a checkpoint tensor that fills them.

    `axes` names the logical axis of each dimension ("heads", "kv_heads", "mlp", "vocab", or None if it is never
    split). `ranges` says which part of each dimension to read; () means the whole tensor. If `default` is set, the
    tensor may be missing from the checkpoint, and the rows are filled with this value.
    """

    name: str  # the tensor's name in the checkpoint
    parameter: Tensor
    first_row: int
    num_rows: int
    axes: Axes
    ranges: tuple[ShardRange, ...] = ()
    default: float | None = None
    transposed: bool = False  # whether the parameter's rows are the columns of the checkpoint tensor
    # If `index` is set, the tensor has an additional first dimension of size `count`; only this index of it is read.
    index: int | None = None
    count: int = 0
    # Every `step`-th row of the tensor is used, starting at `offset`.
    offset: int = 0
    step: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole checkpoint tensor."""
        shape = (self.num_rows, *self.parameter.shape[1:])
        if self.ranges:
            shape = tuple(each.full for each in self.ranges)
        shape = (shape[0] * self.step, *shape[1:])
        shape = shape[::-1] if self.transposed else shape
        return shape if self.index is None else (self.count, *shape)

    @property
    def cut(self) -> tuple[slice, ...]:
        """The slices to read from the checkpoint tensor; () means the whole tensor."""
        if self.index is None and all(each.whole for each in self.ranges):
            return ()
        cut = tuple(each.slice for each in self.ranges)
        if cut and self.step > 1:
            cut = (slice(cut[0].start * self.step, cut[0].stop * self.step), *cut[1:])
        cut = cut[::-1] if self.transposed else cut
        return cut if self.index is None else (slice(self.index, self.index + 1), *cut)

    def pieces(self, most_bytes: int) -> Iterator[Shard]:
        """Yield shards of about `most_bytes` each that together equal this shard. A transposed shard is not split."""
        inner = self.parameter.shape[1:]
        rows = max(1, most_bytes // max(1, self.parameter.element_size() * inner.numel()))
        if self.transposed or self.num_rows <= rows:
            yield self
            return
        first, *rest = self.ranges or (whole_range(size) for size in (self.num_rows, *inner))
        for row in range(0, self.num_rows, rows):
            size = min(rows, self.num_rows - row)
            ranges = (ShardRange(first.start + row, size, first.full), *rest)
            yield self._replace(first_row=self.first_row + row, num_rows=size, ranges=ranges)

    def take(self, part: Tensor) -> None:
        """Fill the rows with `part`, which was read from the checkpoint tensor as `cut` says."""
        part = part if self.index is None else part[0]
        part = part.t() if self.transposed and part.dim() == 2 else part
        self.target.copy_(part if self.step == 1 else part[self.offset :: self.step])

    def give(self, whole: Tensor, part: Tensor | None = None) -> None:
        """Copy the rows (or `part`, which has their shape) into the whole checkpoint tensor: the inverse of `take`."""
        rows = self.target if part is None else part
        place = whole[self.cut]
        place = place if self.index is None else place[0]
        place = place.t() if self.transposed and place.dim() == 2 else place
        place = place if self.step == 1 else place[self.offset :: self.step]
        place.copy_(rows.view(place.shape))

    @property
    def target(self) -> Tensor:
        return self.parameter.data[self.first_row : self.first_row + self.num_rows]


class Weighted(nn.Module):
    """A layer whose own parameters are filled from a checkpoint.

    `allocate` creates the parameters, and the loader fills them as `shards` says. `prepare` may then replace them by
    tensors in the kernels' layout; it frees the originals, so that memory holds each weight once. When new weights are
    loaded, `allocate` and `prepare` are called again.
    """

    # Whether this layer is filled and prepared before the next layer is allocated. True for layers that each hold a
    # block of rows of one large checkpoint tensor, so that memory holds only one unprepared block at a time.
    by_itself = False

    def allocate(self) -> None:
        """Create the parameters for the checkpoint to fill, also if `prepare` has replaced earlier ones."""

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's shard. Called once, while the parameters are still on the meta device."""

    def shards(self) -> Iterator[Shard]:
        """Yield shards that cover each row of the parameters once. Names and shapes stay valid after `prepare`."""
        return iter(())

    def prepare(self) -> None:
        """Convert the filled parameters to the kernels' layout."""


class SubLayer(NamedTuple):
    """One of the model's projections in a fused linear layer: its name, output size and logical output axis.

    If the output is split over ranks, each `unit` of rows (for example a head) stays together. If a checkpoint tensor
    holds several sub-layers, it has `tensor_rows` rows, and this sub-layer begins at `first_row`. Its rows are
    consecutive or, if `piece` is set, in pieces of `piece` rows that begin `stride` rows apart. A `transposed` tensor
    holds outputs as columns.
    """

    name: str
    size: int
    axis: str | None = None
    unit: int = 1
    first_row: int = 0
    tensor_rows: int | None = None
    piece: int | None = None
    stride: int = 0
    transposed: bool = False

    def pieces(self, rows: ShardRange) -> Iterator[tuple[int, ShardRange]]:
        """Split `rows` into parts that are each contiguous in the tensor.

        Yield (offset in `rows`, range in the tensor) of each part.
        """
        piece = self.piece or self.size
        done = 0
        while done < rows.size:
            number, within = divmod(rows.start + done, piece)
            size = min(piece - within, rows.size - done)
            start = self.first_row + number * self.stride + within
            yield done, ShardRange(start, size, self.in_tensor(rows).full)
            done += size

    def in_tensor(self, rows: ShardRange) -> ShardRange:
        """Return the range of `rows` in the checkpoint tensor, if the sub-layer's rows are consecutive."""
        full = self.size if self.tensor_rows is None else self.tensor_rows
        return ShardRange(self.first_row + rows.start, rows.size, full)


def in_one_tensor(name: str, sub_layers: Sequence[SubLayer]) -> list[SubLayer]:
    """Return the sub-layers as consecutive parts of the checkpoint tensor `name`."""
    total, parts = sum(each.size for each in sub_layers), []
    row = 0
    for each in sub_layers:
        parts.append(each._replace(name=name, first_row=row, tensor_rows=total))
        row += each.size
    return parts


def in_groups(name: str, sub_layers: Sequence[SubLayer]) -> list[SubLayer]:
    """Return q, k and v as parts of the tensor `name`, which holds for each kv head its query heads, key and value."""
    total, num_groups = sum(each.size for each in sub_layers), sub_layers[1].size // sub_layers[1].unit
    parts, row = [], 0
    for each in sub_layers:
        piece, stride = each.size // num_groups, total // num_groups
        parts.append(each._replace(name=name, first_row=row, tensor_rows=total, piece=piece, stride=stride))
        row += piece
    return parts


def parameter(*shape: int, dtype: torch.dtype | None = None, bits: int | None = None) -> nn.Parameter:
    """Return an uninitialised parameter. Loading gives it the model's dtype, unless `dtype` is given.

    `bits` is the size of an element after `prepare`, if `prepare` changes this size.
    """
    created = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
    if dtype is not None:
        created.own_dtype = dtype  # type: ignore[attr-defined]
    if bits is not None:
        created.prepared_bits = bits  # type: ignore[attr-defined]
    return created


def frozen(tensor: Tensor) -> nn.Parameter:
    """Return a parameter without gradients that holds this tensor."""
    return nn.Parameter(tensor, requires_grad=False)


def whole(name: str, parameter: Tensor, axes: Axes, rows: ShardRange | None = None) -> Shard:
    """Return the shard that fills a whole parameter from one checkpoint tensor, or from `rows` of this tensor."""
    ranges = () if rows is None else (rows, *(whole_range(size) for size in parameter.shape[1:]))
    return Shard(name, parameter, 0, parameter.shape[0], axes, ranges)
