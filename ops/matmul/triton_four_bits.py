"""One step of the main loop of products with 4-bit integers in Triton, for linear layers and for experts."""

# Pyright cannot check Triton's types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
from __future__ import annotations

import triton
import triton.language as tl

LARGEST_GROUP = tl.constexpr(128)  # maximum number of inputs per group, except for multiples of 128


@triton.jit
def add_step(
    total,  # float32 [ROWS, LINES]
    a,  # [ROWS, STEP]
    codes,  # uint8 [LINES, STEP / 2], two per byte, the first in the lower half
    scales,  # pointers [LINES] to each line's scales (see `Parts` in with_triton.py)
    shifts,  # pointers [LINES] to each line's shifts, or None
    is_line,  # [LINES]
    first,  # index of the step's first input
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return total + a @ weight.T for the inputs of one step, which are whole groups or a part of one group."""
    lines: tl.constexpr = codes.shape[0]
    step: tl.constexpr = 2 * codes.shape[1]
    group: tl.constexpr = min(GROUP, step, LARGEST_GROUP)
    both = codes.to(tl.uint32)
    numbers = tl.interleave(both & 15, both >> 4)  # [LINES, STEP]
    # These are the bits of 2 ** 23 + number in float32, which is exact, and faster than a conversion.
    numbers = (numbers | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0
    inputs = first + tl.arange(0, step // group) * group
    places, is_group = (inputs // GROUP)[None, :], is_line[:, None] & (inputs < IN)[None, :]
    scale = tl.load(scales[:, None] + places, mask=is_group, other=0)  # [LINES, groups]
    if scale.dtype == tl.uint8:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    if a.dtype == tl.float32:
        tl.static_assert(group == step)
        total += tl.dot(a, tl.trans(numbers), input_precision=PRECISION) * tl.sum(scale, axis=1)[None, :]
        if shifts is not None:
            shift = tl.load(shifts[:, None] + places, mask=is_group, other=0.0)
            total += tl.sum(a, axis=1)[:, None] * tl.sum(shift, axis=1)[None, :]
    else:
        grouped = numbers.reshape(lines, step // group, group) * scale[:, :, None]
        if shifts is not None:
            grouped += tl.load(shifts[:, None] + places, mask=is_group, other=0.0)[:, :, None]
        weight = grouped.to(a.dtype).reshape(lines, step)
        total = tl.dot(a, tl.trans(weight), total, input_precision=PRECISION)
    return total
