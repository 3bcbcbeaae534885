"""Linear layers, several of a checkpoint's in one product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ops.select import Kernels
from runtime.layers.sharding import ShardRange, TensorParallelGroup, shard_range, whole_range
from runtime.layers.weight import Shard


class SubLayer(NamedTuple):
    """One of the checkpoint's linear layers: its name, output size, and the logical axis of its output.

    Where the output is cut over ranks, `unit` rows stay together: those of a head.
    """

    name: str
    size: int
    axis: str | None = None
    unit: int = 1


class Linear(nn.Module):
    """x [T, I] -> [T, sum of the parts' sizes]: the parts' outputs one after the other.

    Cut along its output, it gives this rank's share of each part; cut along its input, it takes this rank's
    share of x and gives the sum over all ranks.
    """

    def __init__(
        self,
        in_size: int,
        parts: Sequence[SubLayer],
        kernels: Kernels,
        *,
        bias: bool = False,
        in_axis: str | None = None,
        in_unit: int = 1,
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.in_axis = in_axis
        self.in_unit = in_unit
        self.kernels = kernels
        self._rows = tuple(whole_range(part.size) for part in parts)
        self._columns = whole_range(in_size)
        self._summed_over: TensorParallelGroup | None = None
        size = sum(part.size for part in parts)
        self.weight = nn.Parameter(torch.empty(size, in_size), requires_grad=False)  # [O, I]
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if bias else None

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's rows of each part and this rank's columns."""

        def share(axis: str | None, size: int, unit: int) -> ShardRange:
            return shard_range(axis, size, unit, group.rank, group.size)

        self._rows = tuple(share(part.axis, part.size, part.unit) for part in self.parts)
        self._columns = share(self.in_axis, self._columns.full, self.in_unit)
        size = sum(rows.size for rows in self._rows)
        self.weight = nn.Parameter(self.weight.new_empty(size, self._columns.size), requires_grad=False)
        if self.bias is not None:
            self.bias = nn.Parameter(self.bias.new_empty(size), requires_grad=False)
        if not self._columns.whole:
            self._summed_over = group

    def shards(self) -> Iterator[Shard]:
        row = 0
        for (name, _, axis, _), rows in zip(self.parts, self._rows, strict=True):
            axes = (axis, self.in_axis)
            yield Shard(f"{name}.weight", self.weight, row, rows.size, axes, (rows, self._columns))
            if self.bias is not None:
                yield Shard(f"{name}.bias", self.bias, row, rows.size, (axis,), (rows,))
            row += rows.size

    def prepare(self) -> None:
        self.weight = nn.Parameter(self.kernels.prepare(self.weight), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        group = self._summed_over
        if group is None:
            return self.kernels.linear(x, self.weight, self.bias)
        return group.all_reduce(self.kernels.linear(x, self.weight, self.bias if group.rank == 0 else None))
