"""Cutting layers over ranks: which logical axes are cut, and where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

# Logical axis of a weight -> the axis of the mesh that cuts it. What is not here, every rank holds whole.
MESH_AXES: Mapping[str, str] = {"heads": "tp", "kv_heads": "tp", "mlp": "tp", "vocab": "tp"}
# Axes of which a rank holds at least one unit: with more ranks than units, several ranks hold the same one.
SHARED_AXES = frozenset({"kv_heads"})


class ShardRange(NamedTuple):
    """A rank's part of one dimension: `size` entries from `start`, of `full`."""

    start: int
    size: int
    full: int

    @property
    def whole(self) -> bool:
        return self.size == self.full

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + self.size)


class Stage(NamedTuple):
    """Which part of a decoder's depth a rank computes. The first stage also embeds and has the head."""

    layers: range
    first: bool
    last: bool


class TensorParallelGroup(Protocol):
    """The ranks that share every layer, seen from one of them. All of them call the same methods in step."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, on every rank; in place."""
        ...

    def gather(self, x: Tensor) -> list[Tensor] | None:
        """All ranks' `x`, of one shape, on rank 0; None on the others."""
        ...


def whole_range(full: int) -> ShardRange:
    return ShardRange(0, full, full)


def shard_range(axis: str | None, full: int, unit: int, rank: int, size: int) -> ShardRange:
    """The part of a dimension that `rank` of `size` holds; units (the rows of a head) are never cut.

    Parts differ by one unit at most where the units do not divide evenly.
    """
    if axis is None or MESH_AXES.get(axis) != "tp":
        return whole_range(full)
    units = full // unit
    first, end = rank * units // size, (rank + 1) * units // size
    if axis in SHARED_AXES:
        end = max(end, first + 1)
    return ShardRange(first * unit, (end - first) * unit, full)
