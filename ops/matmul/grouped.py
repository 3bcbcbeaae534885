"""Weights of 4 bits in groups: what a checkpoint holds or rounding gives, before a backend packs it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

WHOLE = tuple(
    float(number) for number in range(-8, 8)
)  # what codes 0 .. 15 stand for where they are whole numbers
ROWS_AT_ONCE = 256  # while rounding: they stay in the cache


class GroupedWeight(NamedTuple):
    """weight[o, i] = table[codes[o, i]] * scales[o, i // group] + shifts[o, i // group], `group` = I / G.

    Of experts all tensors have one more dimension, the first.
    """

    codes: Tensor  # uint8 [O, I], 0 .. 15
    scales: Tensor  # float32 [O, G]
    shifts: Tensor | None = None  # float32 [O, G]
    table: tuple[float, ...] = WHOLE  # sixteen
    rounded_rows: bool = False  # rows of x may be rounded to 8 bits, each with a scale of its own

    @property
    def group(self) -> int:
        return self.codes.shape[-1] // self.scales.shape[-1]

    def of_experts(self, num_experts: int) -> GroupedWeight:
        """The weight of all experts one after the other, [X * O, I], as one with a dimension for them."""
        codes, scales, shifts = (
            None if each is None else each.unflatten(0, (num_experts, -1))
            for each in (self.codes, self.scales, self.shifts)
        )
        return self._replace(codes=codes, scales=scales, shifts=shifts)

    def expert(self, number: int) -> GroupedWeight:
        """That of one expert."""
        shifts = None if self.shifts is None else self.shifts[number]
        return self._replace(codes=self.codes[number], scales=self.scales[number], shifts=shifts)

    def dequantised(self) -> Tensor:
        """float32 [O, I]."""
        numbers = torch.tensor(self.table, device=self.codes.device)[self.codes.int()].unflatten(
            -1, (-1, self.group)
        )
        weight = numbers * self.scales.unsqueeze(-1)
        return (weight if self.shifts is None else weight + self.shifts.unsqueeze(-1)).flatten(-2)


def round_to_groups(weight: Tensor, group: int) -> GroupedWeight:
    """A weight [O, I] rounded to whole numbers from -8 to 7, `group` inputs with one scale.

    The number of the largest magnitude becomes -8 exactly; then the scale is the one of the least squares for the codes
    that were found, and codes are found anew. ValueError where groups do not fill a row.
    """
    out_size, in_size = weight.shape
    if in_size % group:
        raise ValueError(f"Rows of {in_size} cannot be cut in groups of {group}.")
    codes = torch.empty(out_size, in_size, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(out_size, in_size // group, device=weight.device)
    for first in range(0, out_size, ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        part = weight[rows].detach().to(torch.float32).unflatten(1, (-1, group))
        most = part.gather(-1, part.abs().argmax(-1, keepdim=True))
        scale = most / -8
        for _ in range(2):
            numbers = _nearest(part, scale)
            squares = (numbers * numbers).sum(-1, keepdim=True)
            scale = torch.where(squares > 0, (part * numbers).sum(-1, keepdim=True) / squares, scale)
        numbers = _nearest(part, scale)
        codes[rows] = (numbers + 8).flatten(1).to(torch.uint8)
        scales[rows] = scale.squeeze(-1)
    return GroupedWeight(codes, scales)


def round_experts(weight: Tensor, group: int) -> GroupedWeight:
    """As `round_to_groups`, of experts' weights [X, O, I]."""
    return round_to_groups(weight.flatten(0, 1), group).of_experts(len(weight))


def _nearest(weight: Tensor, scale: Tensor) -> Tensor:
    steps = torch.where(scale == 0, 0.0, 1 / scale)
    return (weight * steps).round_().clamp_(-8, 7)
