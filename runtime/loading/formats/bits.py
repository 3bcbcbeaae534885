"""Unpack low-bit numbers from words, and expand scales to the numbers that share them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Values of the 6-bit float e2m3.
_E2M3 = (*(m / 8 for m in range(8)), *((1 + m / 8) * 2.0**e for e in range(3) for m in range(8)))
E2M3 = (*_E2M3, *(-each for each in _E2M3))


def unpack(words: Tensor, bits: int, count: int, *, dense: bool = True) -> Tensor:
    """Unpack int32 words [rows, W] to unsigned numbers, int32 [rows, count], lowest bits first.

    If `dense`, a number may span two words.
    """
    each = torch.arange(count)
    bit = each * bits if dense else each // (32 // bits) * 32 + each % (32 // bits) * bits
    word, offset = bit // 32, bit % 32
    wide = words.to(torch.int64) & 0xFFFFFFFF
    low = wide[:, word] >> offset
    if dense and 32 % bits:  # some numbers span two words
        high = wide[:, (word + 1).clamp_max(words.shape[1] - 1)] << (32 - offset)
        low = torch.where(offset + bits > 32, low | high, low)
    return (low & ((1 << bits) - 1)).to(torch.int32)


def unpack_planes(words: Tensor, bits: int, count: int) -> Tensor:
    """Like `unpack`, for numbers that are split into planes of bits.

    The planes are the lowest 4 bits (2 bits for 3-bit numbers), the next 2 bits and the last bit. Each plane has its
    own words; 32 numbers take `bits` words.
    """
    numbers, word = torch.zeros(len(words), count, dtype=torch.int32), 0
    low = 0  # bits already unpacked
    while low < bits:
        width = next(each for each in (4, 2, 1) if each <= bits - low)
        plane = words.unflatten(1, (-1, bits))[:, :, word : word + width].flatten(1)
        numbers |= unpack(plane, width, count) << low
        word, low = word + width, low + width
    return numbers


def look_up(codes: Tensor, table: Sequence[float] | Tensor) -> Tensor:
    """Return `table[code]` for each code, float32."""
    return torch.as_tensor(table, dtype=torch.float32)[codes.to(torch.int32)]


def spread(scales: Tensor, shape: Sequence[int], blocks: Sequence[int | None] = ()) -> Tensor:
    """Expand scales [..., a, b] to `shape` [..., O, I].

    The numbers of a block share a scale. `blocks` is the size of a block; the default is O / a by I / b. Raises
    ValueError if the scales do not cover the shape.
    """
    for offset in range(1, min(len(shape), 2) + 1):
        axis = len(shape) - offset
        size, count = shape[axis], scales.shape[axis]
        if count in (1, size):
            continue
        stated = blocks[-offset] if len(blocks) >= offset else None
        block = stated or -(-size // count)
        if -(-size // block) != count:
            raise ValueError(f"{count} scales in blocks of {block} do not cover {size}")
        scales = scales.repeat_interleave(block, dim=axis).narrow(axis, 0, size)
    return scales


def power_of_two(exponents: Tensor) -> Tensor:
    """Convert uint8 exponents with a bias of 127 (E8M0) to float32."""
    return torch.ldexp(torch.ones(exponents.shape), exponents.to(torch.int32) - 127)
