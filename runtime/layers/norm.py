"""Normalisation layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor, nn

from runtime.layers.build import Build
from runtime.layers.sharding import TensorParallelGroup, shard_range, whole_range
from runtime.layers.weight import Shard, Weighted, frozen, parameter, whole


class RowReader(Protocol):
    """A layer that reads the normalised rows."""

    row_group: int | None  # number of inputs per scale if the layer rounds its input to float8, otherwise None


class RMSNorm(Weighted):
    """Root mean square normalisation of the last dimension; `unit_offset` scales by 1 + weight.

    With `weight=False` the checkpoint has no weight, and the layer does not scale. If `axis` is given, the ranks divide
    the dimension in multiples of `unit`, and an all-reduce computes the mean over all ranks.
    """

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        build: Build,
        *,
        unit_offset: bool = False,
        weight: bool = True,
        axis: str | None = None,
        unit: int = 1,
    ) -> None:
        super().__init__()
        self.name = name
        self.eps = eps
        self.unit_offset = unit_offset
        self.kernels = build.kernels
        self._axis, self._unit = axis, unit
        self._readers: tuple[
            RowReader, ...
        ] = ()  # a tuple, so that nn.Module does not register a reader as a submodule
        self._default = None if weight else 1.0
        self._rows = whole_range(size)
        self._summed_over: TensorParallelGroup | None = None
        self.allocate()

    @property
    def spans_ranks(self) -> bool:
        """Whether the normalised dimension is divided among ranks."""
        return self._axis is not None

    def allocate(self) -> None:
        self.weight = parameter(self._rows.size)

    def split(self, group: TensorParallelGroup) -> None:
        """Keep this rank's part of the weight, if the dimension is split."""
        if self._axis is not None:
            self._rows = shard_range(self._axis, self._rows.full, self._unit, group.rank, group.size)
            self._summed_over = group
            self.allocate()

    def shards(self) -> Iterator[Shard]:
        shard = whole(f"{self.name}.weight", self.weight, (self._axis,), self._rows)
        yield shard._replace(default=self._default)

    def forward(self, x: Tensor) -> Tensor:
        if self._summed_over is not None:
            return norm_of_ranks(x, self.weight, self.eps, self._summed_over)
        return self.kernels.rms_norm(x, self.weight, self.eps, unit_offset=self.unit_offset)

    def round_for(self, reader: RowReader) -> None:
        """Let `add` also round the normalised rows to float8 if `reader`, the layer that reads them, would do so."""
        self._readers = (reader,)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return norm(x + residual) and x + residual; without a residual, norm(x) and x."""
        if residual is None:
            return self(x), x
        for reader in self._readers:
            if (group := reader.row_group) is not None:
                return self.kernels.add_rms_norm_round(
                    x, residual, self.weight, self.eps, group, unit_offset=self.unit_offset
                )
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps, unit_offset=self.unit_offset)


class LayerNorm(Weighted):
    """Layer normalisation of the last dimension; `unit_offset` scales by 1 + weight.

    With `weight=False` the checkpoint has no weight, and the layer does not scale. With `heads` each head has its own
    weight: [H, D] for H heads of `size` D. The checkpoint holds these weights in one tensor or, if `name` contains
    "{}", in one tensor per head.
    """

    def __init__(
        self,
        name: str,
        size: int,
        eps: float,
        build: Build,
        *,
        weight: bool = True,
        bias: bool = True,
        heads: int | None = None,
        unit_offset: bool = False,
    ) -> None:
        super().__init__()
        self.name = name
        self.eps = eps
        self.kernels = build.kernels
        self.size = size
        self.unit_offset = unit_offset
        self.has_bias = bias
        self._heads = None if heads is None else whole_range(heads)
        self._axis = "heads"
        self._default = None if weight else 1.0
        self.allocate()

    def allocate(self) -> None:
        self.weight = parameter(self.size) if self._heads is None else parameter(self._heads.size, self.size)
        self.bias = parameter(self.size) if self.has_bias else None

    def of_kv_heads(self) -> LayerNorm:
        """Mark the heads as kv heads, so that `split` divides them like kv heads. Returns self."""
        self._axis = "kv_heads"
        return self

    def split(self, group: TensorParallelGroup) -> None:
        """Keep the weights of this rank's heads."""
        if self._heads is not None:
            self._heads = shard_range(self._axis, self._heads.full, 1, group.rank, group.size)
            self.allocate()

    def shards(self) -> Iterator[Shard]:
        if self._heads is None:
            yield whole(f"{self.name}.weight", self.weight, (None,))._replace(default=self._default)
        elif "{}" in self.name:
            for row in range(self._heads.size):
                name = self.name.format(self._heads.start + row)
                yield Shard(f"{name}.weight", self.weight, row, 1, (None,), (whole_range(self.size),))
        else:
            yield whole(f"{self.name}.weight", self.weight, (self._axis, None), self._heads)
        if self.bias is not None:
            yield whole(f"{self.name}.bias", self.bias, (None,))

    def prepare(self) -> None:
        if self.unit_offset:
            self.weight = frozen(self.weight + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return norm(x + residual) and x + residual; without a residual, norm(x) and x."""
        if residual is None:
            return self(x), x
        return self.kernels.add_layer_norm(x, residual, self.weight, self.bias, self.eps)


class NoNorm(nn.Module):
    """Returns its input unchanged. Takes the place of a norm in blocks that have none."""

    def forward(self, x: Tensor) -> Tensor:
        return x

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return x + residual twice; without a residual, x twice."""
        total = x if residual is None else x + residual
        return total, total


Norm = RMSNorm | LayerNorm


def norm_of_ranks(x: Tensor, weight: Tensor, eps: float, group: TensorParallelGroup) -> Tensor:
    """Return the RMS norm of x [..., D / ranks], whose last dimension is split evenly over ranks."""
    wide = x.float()
    mean = group.all_reduce(wide.square().mean(-1, keepdim=True)) / group.size
    return (wide * torch.rsqrt(mean + eps) * weight).to(x.dtype)
