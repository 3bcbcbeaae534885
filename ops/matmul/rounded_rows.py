"""The input rows of a matrix product, together with the same rows rounded to float8."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

LARGEST = torch.finfo(torch.float8_e4m3fn).max
SMALLEST_SCALE = 1e-12


class RoundedRows(Tensor):
    """A tensor x [..., I] that also holds x rounded to e4m3, for float8 products. Other operations read x itself.

    Each group of inputs in a row has one scale, the group's largest magnitude / 448. torch's operations on this tensor
    return plain tensors.
    """

    numbers: Tensor  # e4m3 [T, I]
    scales: Tensor  # float32 [T, I / group]

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def of(cls, x: Tensor, numbers: Tensor, scales: Tensor) -> Self:
        """Return x with its rounded numbers and their scales. The result shares x's memory."""
        rows = x.as_subclass(cls)
        rows.numbers, rows.scales = numbers, scales
        return rows

    def rounding(self, group: int) -> tuple[Tensor, Tensor] | None:
        """Return (numbers, scales) if they are rounded in groups of `group` inputs, otherwise None."""
        return (self.numbers, self.scales) if self.scales.shape[1] * group == self.numbers.shape[1] else None


def round_rows(x: Tensor, group: int) -> RoundedRows:
    """Round x [..., I] in groups of `group` inputs, with torch. Kernels must give the same result."""
    grouped = x.reshape(-1, x.shape[-1]).float().unflatten(1, (-1, group))
    scales = (grouped.abs().amax(2) / LARGEST).clamp_min(SMALLEST_SCALE)
    numbers = (grouped / scales.unsqueeze(2)).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return RoundedRows.of(x, numbers.flatten(1), scales)
