"""Rows of a matrix product's left operand, together with the same rows rounded to float8."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = 1e-12


class RoundedRows(Tensor):
    """Rows x [..., I] that also have their rounding to e4m3, for float8 products. Other operations read x as usual.

    Each group of inputs in a row has one scale: its largest magnitude / 448. torch's operations on these rows return
    plain tensors.
    """

    numbers: Tensor  # e4m3 [T, I]
    scales: Tensor  # float32 [T, I / group]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, x: Tensor, numbers: Tensor, scales: Tensor) -> Self:
        """Return x with this rounding. The result shares x's memory."""
        rows = x.as_subclass(cls)
        rows.numbers, rows.scales = numbers, scales
        return rows

    def rounding(self, group: int) -> tuple[Tensor, Tensor] | None:
        """Return (numbers, scales), or None if the groups do not have size `group`."""
        return (self.numbers, self.scales) if self.scales.shape[1] * group == self.numbers.shape[1] else None


def round_rows(x: Tensor, group: int) -> RoundedRows:
    """Round x [..., I] with torch, as the reference for kernels."""
    grouped = x.reshape(-1, x.shape[-1]).float().unflatten(1, (-1, group))
    scales = (grouped.abs().amax(2) / LARGEST).clamp_min(SMALLEST_SCALE)
    numbers = (grouped / scales.unsqueeze(2)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return RoundedRows.of(x, numbers.flatten(1), scales)
