"""How a layer says which checkpoint tensors its parameters are made of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor, nn

from runtime.layers.sharding import ShardRange, whole_range

Axes = tuple[str | None, ...]


class Shard(NamedTuple):
    """One tensor of a checkpoint and the rows of a parameter that it fills.

    `axes` names the logical axis of each dimension ("heads", "kv_heads", "mlp", "vocab", or None for what is
    never split), so that parallelism is added from outside; `ranges` says which part of each dimension of the
    tensor is taken, () for all of it. With a `default` the checkpoint need not have the tensor.
    """

    name: str  # in the checkpoint
    parameter: nn.Parameter
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
    """A layer whose weights its kernels may want in another layout; called once, when all weights are filled.

    What is replaced is let go, so that memory holds each weight once.
    """

    def prepare(self) -> None: ...


def whole(name: str, parameter: nn.Parameter, axes: Axes, rows: ShardRange | None = None) -> Shard:
    """The shard of a parameter that is one checkpoint tensor, or `rows` of one."""
    ranges = () if rows is None else (rows, *(whole_range(size) for size in parameter.shape[1:]))
    return Shard(name, parameter, 0, parameter.shape[0], axes, ranges)
