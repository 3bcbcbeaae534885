"""Products with e2m1 weights in Triton, for linear layers and for experts: packed words, and the main loop.

A word of 32 bits has the 8 codes that one thread multiplies with tensor cores. A group of four words has 32 inputs.
Word c of a group has the inputs 8 * j + 2 * c + i, where j is the slot (0 .. 3) and i is the half of the word (0 is the
lower half). Each thread therefore reads its part of the weight without exchanging data with other threads.

Each half has four codes, one per slot. A shift moves the sign of a code to bit 15, and its other three bits to the bits
8 to 6. In bfloat16, these are the lower two bits of the exponent and the upper bit of the mantissa. The resulting
number is exactly the code's value times 2 ** -126. One instruction converts two codes, because both halves have the
same layout.
"""

# Pyright cannot check Triton's types.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportAssignmentType=false
from __future__ import annotations

from functools import reduce
from operator import or_

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP_OF_WORDS = 32  # inputs of four words
# For each slot, pairs of (mask of a code's bits, left shift from these bits to the slot's bits).
_BITS = (((8, 12), (7, 6)), ((8, 9), (7, 3)), ((8, 6), (7, 0)), ((8, 11), (6, 9), (1, 13)))


def fits_words(in_size: int) -> bool:
    """Return whether weights with this number of inputs can be packed in words."""
    return in_size % GROUP_OF_WORDS == 0


def pack_words(codes: Tensor) -> Tensor:
    """Return codes of e2m1 numbers, uint8 [..., I], as the bytes of packed words, uint8 [..., I / 2]."""
    slots = codes.unflatten(-1, (-1, 4, 4, 2)).movedim(-3, -1).to(torch.int32)  # [..., group, word, half, slot]
    halves = torch.zeros_like(slots[..., 0])
    for slot, bits in enumerate(_BITS):
        for mask, shift in bits:
            halves |= (slots[..., slot] & mask) << shift
    low, high = halves.unbind(-1)
    return (low | (high << 16)).flatten(-2).contiguous().view(torch.uint8)


def unpack_words(words: Tensor) -> Tensor:
    """Return the codes, uint8 [..., I], of packed words, uint8 [..., I / 2]."""
    whole = words.contiguous().view(torch.int32).unflatten(-1, (-1, 4))
    halves = torch.stack((whole & 0xFFFF, (whole >> 16) & 0xFFFF), dim=-1)
    slots = [reduce(or_, ((halves >> shift) & mask for mask, shift in bits)) for bits in _BITS]
    codes = torch.stack(slots, dim=-1)
    return codes.movedim(-1, -3).flatten(-4).to(torch.uint8)


@triton.jit
def multiply_words(
    rows,  # pointers [ROWS, STEP] to the first inputs of each row
    is_row,  # [ROWS]
    words_of,  # pointers [LINES] to each line's words (int32)
    scales_of,  # pointers [LINES] to each line's scales (see `Parts` in with_triton.py; float8 as uint8)
    is_line,  # [LINES]
    first,  # first input, a multiple of STEP
    end,  # end of the inputs
    IN: tl.constexpr,
    GROUP: tl.constexpr,
    FLOAT8_SCALES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return x @ weight.T, float32 [ROWS, LINES], for these inputs, without the rows' factors."""
    step: tl.constexpr = rows.shape[1]
    group: tl.constexpr = min(GROUP, step)
    inner, words, groups = tl.arange(0, step), tl.arange(0, step // 8), tl.arange(0, step // group)
    # Without these tiles of pointers, Triton would exchange converted weights between threads.
    words_of = words_of[:, None] + words[None, :]
    scales_of = scales_of[:, None] + groups[None, :]
    total = tl.zeros([words_of.shape[0], rows.shape[0]], tl.float32)
    stored = _load_scales(scales_of, is_line, groups, first // GROUP, IN, GROUP)
    for base in range(first, end, step):
        a = tl.load(rows + base, mask=is_row[:, None] & (base + inner < IN)[None, :], other=0.0)
        is_word = is_line[:, None] & (base // 8 + words < IN // 8)[None, :]  # this form permits wide loads
        packed = tl.load(words_of + base // 8, mask=is_word, other=0)
        scale = _scales(stored, a.dtype, FLOAT8_SCALES)
        stored = _load_scales(scales_of, is_line, groups, (base + step) // GROUP, IN, GROUP)  # of the next iteration
        weight = _weight(packed.to(tl.uint32, bitcast=True), scale, a.dtype)
        total = tl.dot(weight, tl.trans(a), total, input_precision=PRECISION)
    return tl.trans(total)


@triton.jit
def _load_scales(scales_of, is_line, groups, first, IN: tl.constexpr, GROUP: tl.constexpr):
    """Return the scales [LINES, groups] of an iteration whose first group has the number `first`."""
    return tl.load(scales_of + first, mask=is_line[:, None] & (groups + first < IN // GROUP)[None, :], other=0)


@triton.jit
def _scales(stored, DTYPE: tl.constexpr, FLOAT8_SCALES: tl.constexpr):
    """Return scales by which decoded numbers are multiplied, in the weights' dtype if this is exact.

    The decoded numbers are values times 2 ** -14 if DTYPE is float16, otherwise times 2 ** -126.
    """
    is_packed: tl.constexpr = not FLOAT8_SCALES and stored.dtype == tl.uint8  # as exponents, with a factor of 2 ** 126
    if is_packed and tl.bfloat16 == DTYPE:
        return (stored.to(tl.int16) << 7).to(tl.bfloat16, bitcast=True)
    scale = stored
    if FLOAT8_SCALES:
        # Build the float16 number scale * 2 ** -8.
        scale = ((scale.to(tl.int16) & 0x80) << 8) | ((scale.to(tl.int16) & 0x7F) << 7)
        scale = scale.to(tl.float16, bitcast=True).to(tl.float32)
    elif is_packed:
        scale = (scale.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    if tl.float16 == DTYPE:
        scale *= 1.925929944387236e-34 if is_packed else 16384.0  # 2 ** -112, 2 ** 14
    elif not is_packed:
        scale *= 8.507059173023462e37  # 2 ** 126
    return scale if stored.dtype == tl.float32 else scale.to(DTYPE)


@triton.jit
def _weight(packed, scale, DTYPE: tl.constexpr):
    """Return the weights [LINES, STEP] of packed words [LINES, STEP / 8] in DTYPE, each multiplied by its scale."""
    lines: tl.constexpr = packed.shape[0]
    step: tl.constexpr = 8 * packed.shape[1]
    slot0, slot1 = packed & 0x81C081C0, (packed << 3) & 0x81C081C0
    slot2 = (packed << 6) & 0x81C081C0
    slot3 = ((packed << 1) & 0x80008000) | ((packed >> 3) & 0x01800180) | ((packed >> 7) & 0x00400040)
    lower, upper = (
        tl.join(_halves(slot0, DTYPE), _halves(slot1, DTYPE)),
        tl.join(_halves(slot2, DTYPE), _halves(slot3, DTYPE)),
    )
    # [group of words, word, half, lower bit of the slot's number, upper bit] -> the order of inputs
    by_slot = tl.join(lower, upper).reshape(lines, step // 32, 4, 2, 2, 2)
    bits = by_slot.permute(0, 1, 5, 4, 2, 3).reshape(lines, scale.shape[1], step // scale.shape[1])
    if tl.float32 == DTYPE:
        numbers = (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        numbers = bits.to(DTYPE, bitcast=True)
    if scale.dtype != numbers.dtype:
        numbers = numbers.to(tl.float32)
    scaled = (numbers * scale[:, :, None]).to(DTYPE)
    second, one = tl.split(scaled.reshape(lines, step // 2, 2))
    return tl.join(one, second).reshape(lines, step)


@triton.jit
def _halves(slot, DTYPE: tl.constexpr):
    """Return the upper and the lower half of each word, [..., 2]. In this order, compilers multiply them as a pair."""
    if tl.float16 == DTYPE:  # the same bits of a float16 number are the value times 2 ** -14
        slot = (slot & 0x80008000) | ((slot & 0x01C001C0) << 3)
    return tl.join((slot >> 16).to(tl.uint16), slot.to(tl.uint16))
