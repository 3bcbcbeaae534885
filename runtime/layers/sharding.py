"""Tensor-parallel sharding: the logical axes that are split over ranks, and the range of each rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

# Logical axis of a weight -> mesh axis that splits it. Other axes are never split.
MESH_AXES: Mapping[str, str] = {"heads": "tp", "kv_heads": "tp", "mlp": "tp", "vocab": "tp"}
# Axes of which each rank holds at least one unit: with more ranks than units, several ranks hold the same unit.
SHARED_AXES = frozenset({"kv_heads"})


class ShardRange(NamedTuple):
    """A rank's range of one dimension: `size` entries from `start`, out of `full`."""

    start: int
    size: int
    full: int

    @property
    def whole(self) -> bool:
        return self.size == self.full

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + self.size)


class TensorParallelGroup(Protocol):
    """This rank's tensor-parallel group. All ranks of the group must call the same methods in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add all ranks' `x` in place and return the sum on every rank."""
        ...

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """Return the `x` of all ranks on rank 0, and None on other ranks. Each `x` must have the same shape."""
        ...


def whole_range(full: int) -> ShardRange:
    return ShardRange(0, full, full)


def shard_range(axis: str | None, full: int, unit: int, rank: int, size: int) -> ShardRange:
    """Return the range of a dimension that `rank` holds. A unit, for example the rows of a head, is never split.

    If the units do not divide evenly, ranges differ by at most one unit.
    """
    if axis is None or MESH_AXES.get(axis) != "tp":
        return whole_range(full)
    units = full // unit
    first, end = rank * units // size, (rank + 1) * units // size
    if axis in SHARED_AXES:
        end = max(end, first + 1)
    return ShardRange(first * unit, (end - first) * unit, full)
