"""Linear layers, several of a checkpoint's in one product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ops.select import Kernels
from runtime.layers.weight import Piece


class Part(NamedTuple):
    """One of the checkpoint's linear layers: its name, output size, and the logical axis of its output."""

    name: str
    size: int
    axis: str | None = None


class Linear(nn.Module):
    """x [T, I] -> [T, sum of the parts' sizes]: the parts' outputs one after the other."""

    def __init__(
        self,
        in_size: int,
        parts: Sequence[Part],
        kernels: Kernels,
        *,
        bias: bool = False,
        in_axis: str | None = None,
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        self.in_axis = in_axis
        self.kernels = kernels
        size = sum(part.size for part in parts)
        self.weight = nn.Parameter(torch.empty(size, in_size), requires_grad=False)  # [O, I]
        self.bias = nn.Parameter(torch.empty(size), requires_grad=False) if bias else None

    def pieces(self) -> Iterator[Piece]:
        row = 0
        for name, size, axis in self.parts:
            yield Piece(f"{name}.weight", self.weight, row, size, (axis, self.in_axis))
            if self.bias is not None:
                yield Piece(f"{name}.bias", self.bias, row, size, (axis,))
            row += size

    def prepare(self) -> None:
        self.weight = nn.Parameter(self.kernels.prepare(self.weight), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x, self.weight, self.bias)
