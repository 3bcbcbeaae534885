"""How a layer says which checkpoint tensors its parameters are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from runtime.layers.sharding import ShardRange, whole_range

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

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor in the checkpoint."""
        if self.ranges:
            return tuple(each.full for each in self.ranges)
        return (self.num_rows, *self.parameter.shape[1:])

    @property
    def cut(self) -> tuple[slice, ...]:
        """What is taken of the tensor; () for all of it."""
        return () if all(each.whole for each in self.ranges) else tuple(each.slice for each in self.ranges)

    @property
    def target(self) -> Tensor:
        return self.parameter.data[self.first_row : self.first_row + self.num_rows]


@runtime_checkable
class Weighted(Protocol):
    """A layer with parameters of its own; its shards cover each of their rows exactly once."""

    def shards(self) -> Iterator[Shard]: ...


@runtime_checkable
class Prepared(Protocol):
    """A layer whose weights its kernels may want in another layout.

    Its shards fill what `allocate` made; then `prepare` replaces that, and lets it go, so that memory holds each weight
    once. Both are called again where the layer gets new weights. Its shards may be asked at any time for the names and
    shapes of tensors.
    """

    def allocate(self) -> None:
        """Make the parameters that the checkpoint's tensors fill."""
        ...

    def prepare(self) -> None: ...


class SubLayer(NamedTuple):
    """One of the model's linear layers: its name, output size, and the logical axis of its output.

    Where the output is cut over ranks, `unit` rows stay together: those of a head. In a checkpoint that holds several
    of them in one tensor, it has the rows from `first_row` on, of `tensor_rows`.
    """

    name: str
    size: int
    axis: str | None = None
    unit: int = 1
    first_row: int = 0
    tensor_rows: int | None = None

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


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """A parameter to be filled; in the model's dtype, or one of its own that loading leaves as it is."""
    made = nn.Parameter(torch.empty(*shape, dtype=dtype), requires_grad=False)
    if dtype is not None:
        made.own_dtype = dtype  # type: ignore[attr-defined]
    return made


def frozen(tensor: Tensor) -> nn.Parameter:
    """A parameter that holds this tensor, without gradients."""
    return nn.Parameter(tensor, requires_grad=False)


def whole(name: str, parameter: Tensor, axes: Axes, rows: ShardRange | None = None) -> Shard:
    """The shard of a parameter that is one checkpoint tensor, or `rows` of one."""
    ranges = () if rows is None else (rows, *(whole_range(size) for size in parameter.shape[1:]))
    return Shard(name, parameter, 0, parameter.shape[0], axes, ranges)
