"""Weights of 4 to 8 bits in groups: what a checkpoint holds or rounding gives, before a backend packs it."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

# What codes 0 .. 15 stand for where they are whole numbers.
WHOLE = tuple(float(number) for number in range(-8, 8))
CODE_BITS = (4, 5, 6, 8)  # that codes may have
ROWS_AT_ONCE = 256  # while rounding: they stay in the cache


class GroupForm(NamedTuple):
    """How a weight's numbers are given: inputs in a group, bits of a code, and what the codes of 4 bits stand for."""

    group: int
    bits: int = 4  # or 5, 6, 8: whole numbers, of which 0 has the code in the middle
    table: tuple[float, ...] = WHOLE
    shifted: bool = True  # unless it is known that there are no shifts

    @property
    def fits(self) -> bool:
        """Whether groups are whole units of the codes, as kernels have them."""
        return self.group % {5: 32, 6: 16}.get(self.bits, 8) == 0


def common_form(forms: Collection[GroupForm]) -> GroupForm | None:
    """In which all of these weights can be given without loss, in as few bits as there can be; None: there is none."""
    first, *others = forms
    if all(form == first for form in others):
        return first if first.fits else None
    group, bits = min(form.group for form in forms), max(form.bits for form in forms)
    if len({form.table for form in forms}) > 1:
        bits = 8
    if any(form.group % group or not is_whole(form.table) for form in forms):
        return None
    shifted = any(form.shifted for form in forms)
    fitting = (GroupForm(group, each, WHOLE, shifted) for each in CODE_BITS if each >= bits)
    return next((form for form in fitting if form.fits), None)


def code_bits(bits: int) -> int:
    """How many bits the codes of whole numbers of so many have, 8 at most."""
    return next(each for each in CODE_BITS if each >= bits)


def is_whole(table: tuple[float, ...]) -> bool:
    """Whether all that codes stand for are whole numbers of 8 bits."""
    return all(number == int(number) and -128 <= number < 128 for number in table)


class GroupedWeight(NamedTuple):
    """weight[o, i] = table[codes[o, i]] * scales[o, i // group] + shifts[o, i // group], `group` = I / G.

    Of more than 4 bits the codes stand for themselves, less the one in the middle. Of experts all tensors have one more
    dimension, the first.
    """

    codes: Tensor  # uint8 [O, I], 0 .. 15, or up to 31, 63 or 255
    scales: Tensor  # float32 [O, G]
    shifts: Tensor | None = None  # float32 [O, G]
    table: tuple[float, ...] = WHOLE  # sixteen
    rounded_rows: bool = False  # with 4 bits rows of x may be rounded to 8, each with a scale of its own
    bits: int = 4

    @property
    def group(self) -> int:
        return self.codes.shape[-1] // self.scales.shape[-1]

    def as_form(self, form: GroupForm) -> GroupedWeight:
        """The same weight in a form that is its own, or common to it and others (`common_form`)."""
        times = self.group // form.group
        scales, shifts = (
            each if each is None or times == 1 else each.repeat_interleave(times, dim=-1)
            for each in (self.scales, self.shifts)
        )
        codes = self.codes
        if form.bits != self.bits:
            middle = 1 << form.bits >> 1
            numbers = self.table if self.bits == 4 else range(-(1 << self.bits >> 1), 1 << self.bits >> 1)
            codes = torch.tensor([int(each) + middle for each in numbers], dtype=torch.uint8)[codes.int()]
        return self._replace(codes=codes, scales=scales, shifts=shifts, table=form.table, bits=form.bits)

    def rows(self, rows: slice) -> GroupedWeight:
        """Some of its outputs."""
        shifts = None if self.shifts is None else self.shifts[rows]
        return self._replace(codes=self.codes[rows], scales=self.scales[rows], shifts=shifts)

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
        if self.bits == 4:
            numbers = torch.tensor(self.table, device=self.codes.device)[self.codes.int()]
        else:
            numbers = self.codes.float() - (1 << self.bits >> 1)
        weight = numbers.unflatten(-1, (-1, self.group)) * self.scales.unsqueeze(-1)
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
