"""How a layer says which checkpoint tensors its parameters are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from runtime.layers.sharding import ShardRange, TensorParallelGroup, whole_range

Axes = tuple[str | None, ...]


class Shard(NamedTuple):
    """What some rows of a parameter are filled with: one tensor of a checkpoint, or a part of it.

    `axes` names the logical axis of each dimension ("heads", "kv_heads", "mlp", "vocab", or None for what is
    never split), so that parallelism is added from outside; `ranges` says which part of each dimension of the
    tensor is taken, () for all of it. With a `default` the checkpoint need not have the tensor.
    """

    name: str  # in the checkpoint
    parameter: Tensor
    first_row: int
    num_rows: int
    axes: Axes
    ranges: tuple[ShardRange, ...] = ()
    default: float | None = None
    transposed: bool = False  # in the checkpoint, where the parameter's rows are columns then
    index: int | None = None  # in the first dimension of a tensor that holds `count` such parts
    count: int = 0
    offset: int = 0  # of `step` rows of the tensor that stand beside each other this is the one that is taken
    step: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor in the checkpoint."""
        shape = (self.num_rows, *self.parameter.shape[1:])
        if self.ranges:
            shape = tuple(each.full for each in self.ranges)
        shape = (shape[0] * self.step, *shape[1:])
        shape = shape[::-1] if self.transposed else shape
        return shape if self.index is None else (self.count, *shape)

    @property
    def cut(self) -> tuple[slice, ...]:
        """What is taken of the tensor; () for all of it."""
        if self.index is None and all(each.whole for each in self.ranges):
            return ()
        cut = tuple(each.slice for each in self.ranges)
        if cut and self.step > 1:
            cut = (slice(cut[0].start * self.step, cut[0].stop * self.step), *cut[1:])
        cut = cut[::-1] if self.transposed else cut
        return cut if self.index is None else (slice(self.index, self.index + 1), *cut)

    def pieces(self, most_bytes: int) -> Iterator[Shard]:
        """The same in parts of about so many bytes; whole where rows are columns of the checkpoint's tensor."""
        inner = self.parameter.shape[1:]
        rows = max(1, most_bytes // max(1, self.parameter.element_size() * inner.numel()))
        if self.transposed or self.num_rows <= rows:
            yield self
            return
        first, *others = self.ranges or (whole_range(size) for size in (self.num_rows, *inner))
        for row in range(0, self.num_rows, rows):
            size = min(rows, self.num_rows - row)
            ranges = (ShardRange(first.start + row, size, first.full), *others)
            yield self._replace(first_row=self.first_row + row, num_rows=size, ranges=ranges)

    def take(self, part: Tensor) -> None:
        """Fill the rows with what was cut out of the checkpoint's tensor."""
        part = part if self.index is None else part[0]
        part = part.t() if self.transposed and part.dim() == 2 else part
        self.target.copy_(part if self.step == 1 else part[self.offset :: self.step])

    @property
    def target(self) -> Tensor:
        return self.parameter.data[self.first_row : self.first_row + self.num_rows]


class Weighted(nn.Module):
    """A layer with parameters of its own, which a checkpoint fills.

    Its shards fill what `allocate` made; then `prepare` may replace that by what kernels want, and lets it go, so that
    memory holds each weight once. Both are called again where the layer gets new weights.
    """

    # One of several that share a tensor: filled and prepared before the next one has memory.
    by_itself = False

    def allocate(self) -> None:
        """Make the parameters that the checkpoint's tensors fill, where `prepare` replaces them."""

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's part of what can be cut. Called once, before the parameters have memory."""

    def shards(self) -> Iterator[Shard]:
        """They cover each row of the parameters exactly once; names and shapes may be asked for at any time."""
        return iter(())

    def prepare(self) -> None:
        """The parameters are filled."""


class SubLayer(NamedTuple):
    """One of the model's linear layers: its name, output size, and the logical axis of its output.

    Where the output is cut over ranks, `unit` rows stay together: those of a head. In a checkpoint that holds several
    of them in one tensor, it has the rows from `first_row` on, of `tensor_rows`: all in a row, or in pieces of `piece`
    rows that begin `stride` rows apart. A `transposed` tensor holds outputs as columns.
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
        """Where some of its rows are in the checkpoint's tensor: (the first of these rows, rows there) of each part."""
        piece = self.piece or self.size
        done = 0
        while done < rows.size:
            number, within = divmod(rows.start + done, piece)
            size = min(piece - within, rows.size - done)
            start = self.first_row + number * self.stride + within
            yield done, ShardRange(start, size, self.in_tensor(rows).full)
            done += size

    def in_tensor(self, rows: ShardRange) -> ShardRange:
        """Where some of its rows are in the checkpoint's tensor."""
        full = self.size if self.tensor_rows is None else self.tensor_rows
        return ShardRange(self.first_row + rows.start, rows.size, full)


def in_one_tensor(name: str, sub_layers: Sequence[SubLayer]) -> list[SubLayer]:
    """The same sub-layers, one after the other in the checkpoint's tensor `name`."""
    total, found = sum(each.size for each in sub_layers), []
    row = 0
    for each in sub_layers:
        found.append(each._replace(name=name, first_row=row, tensor_rows=total))
        row += each.size
    return found


def in_groups(name: str, sub_layers: Sequence[SubLayer]) -> list[SubLayer]:
    """q, k and v in the checkpoint's tensor `name`, which holds for each kv head its queries, its key and its value."""
    total, num_groups = sum(each.size for each in sub_layers), sub_layers[1].size // sub_layers[1].unit
    found, row = [], 0
    for each in sub_layers:
        piece, stride = each.size // num_groups, total // num_groups
        found.append(each._replace(name=name, first_row=row, tensor_rows=total, piece=piece, stride=stride))
        row += piece
    return found


def parameter(*shape: int, dtype: torch.dtype | None = None, bits: int | None = None) -> nn.Parameter:
    """A parameter to be filled; in the model's dtype, or one of its own that loading leaves as it is.

    Once prepared its numbers have so many `bits`, if not those of the dtype.
    """
    made = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
    if dtype is not None:
        made.own_dtype = dtype  # type: ignore[attr-defined]
    if bits is not None:
        made.prepared_bits = bits  # type: ignore[attr-defined]
    return made


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter that holds this tensor, without gradients."""
    return nn.Parameter(tensor, requires_grad=False)


def whole(name: str, parameter: Tensor, axes: Axes, rows: ShardRange | None = None) -> Shard:
    """The shard of a parameter that is one checkpoint tensor, or `rows` of one."""
    ranges = () if rows is None else (rows, *(whole_range(size) for size in parameter.shape[1:]))
    return Shard(name, parameter, 0, parameter.shape[0], axes, ranges)
