"""Normalisation layers."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from runtime.layers.build import Build
from runtime.layers.weight import Shard, parameter, whole


class RMSNorm(nn.Module):
    """Root mean square normalisation of the last dimension; `unit_offset` scales by 1 + weight."""

    def __init__(self, name: str, size: int, eps: float, build: Build, *, unit_offset: bool = False) -> None:
        super().__init__()
        self.name = name
        self.eps = eps
        self.unit_offset = unit_offset
        self.kernels = build.kernels
        self.weight = parameter(size)

    def shards(self) -> Iterator[Shard]:
        yield whole(f"{self.name}.weight", self.weight, (None,))

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.rms_norm(x, self.weight, self.eps, unit_offset=self.unit_offset)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); x itself where there is no residual yet."""
        if residual is None:
            return self(x), x
        return self.kernels.add_rms_norm(x, residual, self.weight, self.eps, unit_offset=self.unit_offset)
