"""Rows of a product's left operand together with their rounding to float8."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = 1e-12


class RoundedRows(Tensor):
    """Rows x [..., I], which operations read like any tensor, and their rounding to e4m3 for float8 products.

    A group of inputs of a row has one scale: its largest magnitude / 448. The results of torch's operations on these
    rows are plain tensors.
    """

    numbers: Tensor  # e4m3 [T, I]
    scales: Tensor  # float32 [T, I / group]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, x: Tensor, numbers: Tensor, scales: Tensor) -> Self:
        """Return the rows x, which share x's memory, with their rounding."""
        rows = x.as_subclass(cls)
        rows.numbers, rows.scales = numbers, scales
        return rows

    def rounding(self, group: int) -> tuple[Tensor, Tensor] | None:
        """Return (numbers, scales), or None if the groups have another size."""
        return (self.numbers, self.scales) if self.scales.shape[1] * group == self.numbers.shape[1] else None


def round_rows(x: Tensor, group: int) -> RoundedRows:
    """Round x [..., I] in torch. The reference for kernels."""
    grouped = x.reshape(-1, x.shape[-1]).float().unflatten(1, (-1, group))
    scales = (grouped.abs().amax(2) / LARGEST).clamp_min(SMALLEST_SCALE)
    numbers = (grouped / scales.unsqueeze(2)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return RoundedRows.of(x, numbers.flatten(1), scales)
