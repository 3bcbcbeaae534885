"""Quantised weights before a backend packs them: codes of 4 to 8 bits, and a scale per group of inputs.

They come from a checkpoint, or from rounding. Codes are integers or float8 numbers (e4m3).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch
from torch import Tensor

# Values of the 4-bit codes 0 .. 15, if the codes represent integers.
WHOLE = tuple(float(number) for number in range(-8, 8))
# Values of the 4-bit codes 0 .. 15, if the codes represent floats (e2m1). The sign is the highest bit.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# Numbers of inputs per group that Triton kernels support for 4-bit weights. Multiples of 128 are also supported.
TRITON_GROUPS = (16, 32, 64, 128)
CODE_BITS = (4, 5, 6, 8)  # supported numbers of bits of a code
SMALLEST_SCALE = 1e-12  # scale of a row that contains only zeros
FACTORED_ROWS = 4096  # number of rows whose scales `factor_scales` processes at a time
FACTORED_ERROR = 2.0**-20  # maximum relative error of `factor_scales`; rounding in float32 causes at most 2 ** -22
ROWS_AT_ONCE = 256  # number of rows that are rounded at a time, so that they stay in the cache


class GroupForm(NamedTuple):
    """Format of a grouped weight."""

    group: int  # number of inputs per group
    bits: int = 4  # bits per code: 4, 5, 6 or 8; with more than 4 bits, the code 2 ** (bits - 1) represents 0
    table: tuple[float, ...] = WHOLE  # values of the 4-bit codes
    shifted: bool = True  # whether each group has a shift, which is added to its values
    floating: bool = False  # whether the codes have 8 bits and are float8 numbers (e4m3) instead of integers
    powers: bool = False  # whether all scales are powers of two
    input_scaled: bool = False  # whether the weight has `input_scales`

    @property
    def fits(self) -> bool:
        """Whether C++ kernels can read groups of this size. They read 8 codes at a time (5 bits: 32, 6 bits: 16)."""
        return self.group % {5: 32, 6: 16}.get(self.bits, 8) == 0


def common_form(forms: Collection[GroupForm]) -> GroupForm | None:
    """Return the form with the fewest bits that `fits` and represents weights of all `forms` without loss.

    Returns None if there is no such form.
    """
    first, *others = forms
    if all(form == first for form in others):
        return first if first.fits else None
    group, bits = min(form.group for form in forms), max(form.bits for form in forms)
    if first.floating and all(form.floating for form in others) and not any(form.group % group for form in forms):
        return first._replace(group=group)
    if len({form.table for form in forms}) > 1:
        bits = 8
    if any(form.group % group or form.floating or not is_whole(form.table) for form in forms):
        return None
    shifted = any(form.shifted for form in forms)
    fitting = (GroupForm(group, each, WHOLE, shifted) for each in CODE_BITS if each >= bits)
    return next((form for form in fitting if form.fits), None)


def packed_pairs(codes: Tensor) -> Tensor:
    """Pack 4-bit codes, uint8 [..., 2n] -> uint8 [..., n], the first of each pair in the lower half."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def nibbles(packed: Tensor, *, high_first: bool = False) -> Tensor:
    """Split each byte into its two halves, uint8 [..., n] -> uint8 [..., 2n]."""
    low, high = packed & 15, packed >> 4
    return torch.stack((high, low) if high_first else (low, high), dim=-1).flatten(-2)


def code_bits(bits: int) -> int:
    """Return the smallest of `CODE_BITS` that is at least `bits`."""
    return next(each for each in CODE_BITS if each >= bits)


def is_whole(table: tuple[float, ...]) -> bool:
    """Return whether all values in the table are 8-bit integers."""
    return all(number == int(number) and -128 <= number < 128 for number in table)


class GroupedWeight(NamedTuple):
    """A quantised weight [O, I]. Rows are divided into G groups of I / G inputs, with a scale and perhaps a shift each.

    weight[o, i] = table[codes[o, i]] * scales[o, i // group] + shifts[o, i // group]

    The formula is for 4 bits. With more bits, table[codes[o, i]] is replaced by codes[o, i] - 2 ** (bits - 1) or, if
    the weight is `floating`, by the float8 number (e4m3) that has the bits codes[o, i]. The tensors of experts have an
    additional first dimension.
    """

    codes: Tensor  # uint8 [O, I], from 0 to 2 ** bits - 1
    scales: Tensor  # float32 [O, G]
    shifts: Tensor | None = None  # float32 [O, G]; None: no shifts
    table: tuple[float, ...] = WHOLE  # 16 values
    rounded_rows: bool = False  # whether products may round each row of x to 8 bits with one scale; only for 4 bits
    bits: int = 4
    floating: bool = False
    powers: bool = False  # whether all scales are powers of two
    # float32, one per tensor of the checkpoint that this weight joins ([X, N] for experts): the factors for rounding
    # inputs to NVFP4 (`nvfp4.py`). None: inputs must not be rounded.
    input_scales: Tensor | None = None

    @property
    def group(self) -> int:
        return self.codes.shape[-1] // self.scales.shape[-1]

    def as_form(self, form: GroupForm) -> GroupedWeight:
        """Return the same weight in `form`: its own form, or the `common_form` of its own form and others.

        Raises ValueError for a conversion between integers and float8 numbers.
        """
        times = self.group // form.group
        scales, shifts = (
            each if each is None or times == 1 else each.repeat_interleave(times, dim=-1)
            for each in (self.scales, self.shifts)
        )
        codes = self.codes
        if form.floating != self.floating:
            raise ValueError("Numbers of float8 cannot become integers.")
        if form.bits != self.bits:
            middle = 1 << form.bits >> 1
            numbers = self.table if self.bits == 4 else range(-(1 << self.bits >> 1), 1 << self.bits >> 1)
            codes = torch.tensor([int(each) + middle for each in numbers], dtype=torch.uint8)[codes.int()]
        return self._replace(
            codes=codes, scales=scales, shifts=shifts, table=form.table, bits=form.bits, powers=form.powers
        )

    def rows(self, rows: slice) -> GroupedWeight:
        """Return the part of the weight for these outputs."""
        shifts = None if self.shifts is None else self.shifts[rows]
        return self._replace(codes=self.codes[rows], scales=self.scales[rows], shifts=shifts)

    def of_experts(self, num_experts: int) -> GroupedWeight:
        """Return a weight [X * O, I] of all experts as a weight [X, O, I]."""
        codes, scales, shifts, input_scales = (
            None if each is None else each.unflatten(0, (num_experts, -1))
            for each in (self.codes, self.scales, self.shifts, self.input_scales)
        )
        return self._replace(codes=codes, scales=scales, shifts=shifts, input_scales=input_scales)

    def expert(self, number: int) -> GroupedWeight:
        """Return the weight of one expert."""
        shifts, input_scales = (None if each is None else each[number] for each in (self.shifts, self.input_scales))
        codes, scales = self.codes[number], self.scales[number]
        return self._replace(codes=codes, scales=scales, shifts=shifts, input_scales=input_scales)

    def dequantised(self) -> Tensor:
        """Return the weight in float32 [O, I]."""
        if self.bits == 4:
            numbers = torch.tensor(self.table, device=self.codes.device)[self.codes.int()]
        elif self.floating:
            numbers = self.codes.view(torch.float8_e4m3fn).float()
        else:
            numbers = self.codes.float() - (1 << self.bits >> 1)
        weight = numbers.unflatten(-1, (-1, self.group)) * self.scales.unsqueeze(-1)
        return (weight if self.shifts is None else weight + self.shifts.unsqueeze(-1)).flatten(-2)


def fits_triton(weight: GroupedWeight | GroupForm) -> bool:
    """Return whether the Triton kernels can read this weight, or weights of this form, in 4 bits."""
    fits = weight.group in TRITON_GROUPS or weight.group % TRITON_GROUPS[-1] == 0
    return weight.bits == 4 and weight.table in (WHOLE, E2M1) and fits


def factor_scales(scales: Tensor) -> tuple[Tensor, Tensor] | None:
    """Factor scales [..., G] into float8 numbers (e4m3) [..., G] and one float32 factor per row [...].

    The product of number and factor equals the scale, except for rounding in float32. The scales of NVFP4 can be
    factored. Returns None for scales that cannot. For each row, the function tries 8 factors: those that map the row's
    largest scale to one of the 8 mantissas of e4m3 with the largest exponent.
    """
    groups = scales.shape[-1]
    rows = scales.detach().float().reshape(-1, groups)
    numbers = torch.zeros(rows.shape, dtype=torch.uint8, device=rows.device)
    factors = torch.ones(len(rows), device=rows.device)
    for first in range(0, len(rows), FACTORED_ROWS):
        part = rows[first : first + FACTORED_ROWS]
        largest = part.abs().amax(1, keepdim=True)
        known = largest.squeeze(1) == 0
        for mantissa in range(8, 16):
            factor = torch.where(largest > 0, largest / (mantissa * (32 if mantissa < 15 else 16)), 1.0)
            nearest = (part / factor).to(torch.float8_e4m3fn)
            errors = (nearest.float() * factor - part).abs()
            fits = (errors <= part.abs() * FACTORED_ERROR).all(1) & ~known
            numbers[first : first + FACTORED_ROWS][fits] = nearest.view(torch.uint8)[fits]
            factors[first : first + FACTORED_ROWS][fits] = factor.squeeze(1)[fits]
            known |= fits
        if not bool(known.all()):
            return None
    return numbers.view(torch.float8_e4m3fn).view(scales.shape), factors.view(scales.shape[:-1])


def round_to_groups(weight: Tensor, group: int) -> GroupedWeight:
    """Return a weight [O, I] rounded to integers from -8 to 7, with one scale per `group` inputs.

    The first scale maps the element of largest magnitude to -8. Each of two iterations then computes the least-squares
    scale for the current codes, and new codes for this scale. Raises ValueError if I is not a multiple of `group`.
    """
    out_size, in_size = weight.shape
    if in_size % group:
        raise ValueError(f"Rows of {in_size} inputs cannot be divided into groups of {group}.")
    codes = torch.empty(out_size, in_size, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(out_size, in_size // group, device=weight.device)
    for first in range(0, out_size, ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        part = weight[rows].detach().to(torch.float32).unflatten(1, (-1, group))
        largest = part.gather(-1, part.abs().argmax(-1, keepdim=True))
        scale = largest / -8
        for _ in range(2):
            numbers = _nearest(part, scale)
            squares = (numbers * numbers).sum(-1, keepdim=True)
            scale = torch.where(squares > 0, (part * numbers).sum(-1, keepdim=True) / squares, scale)
        numbers = _nearest(part, scale)
        codes[rows] = (numbers + 8).flatten(1).to(torch.uint8)
        scales[rows] = scale.squeeze(-1)
    return GroupedWeight(codes, scales)


def smallest_scale(dtype: torch.dtype) -> float:
    """Return the scale of a row of zeros: 1e-12, or the smallest positive number of `dtype` if that is larger."""
    info = torch.finfo(dtype)
    return max(SMALLEST_SCALE, info.smallest_normal * info.eps)


def round_to_float8(weight: Tensor) -> GroupedWeight:
    """Return a weight [..., O, I] rounded to float8 (e4m3). The scale of an output is its largest magnitude / 448.

    Scales are rounded to the weight's dtype.
    """
    largest = torch.finfo(torch.float8_e4m3fn).max
    wide = weight.detach().float()
    scales = (wide.abs().amax(-1, keepdim=True) / largest).clamp_min(smallest_scale(weight.dtype))
    scales = scales.to(weight.dtype).float()
    numbers = (wide / scales).clamp_(-largest, largest).to(torch.float8_e4m3fn)
    return GroupedWeight(numbers.view(torch.uint8), scales, bits=8, floating=True)


def round_experts(weight: Tensor, group: int) -> GroupedWeight:
    """Return experts' weights [X, O, I] rounded by `round_to_groups`."""
    return round_to_groups(weight.flatten(0, 1), group).of_experts(len(weight))


def _nearest(weight: Tensor, scale: Tensor) -> Tensor:
    steps = torch.where(scale == 0, 0.0, 1 / scale)
    return (weight * steps).round_().clamp_(-8, 7)
