"""Numbers of a few bits out of the words that hold them, and scales out to the numbers that share them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# The sixteen numbers of 4 bits with two of exponent and one of mantissa: sign in the highest bit.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# The sixty-four of 6 bits with two of exponent and three of mantissa.
_E2M3 = (*(m / 8 for m in range(8)), *((1 + m / 8) * 2.0**e for e in range(3) for m in range(8)))
E2M3 = (*_E2M3, *(-each for each in _E2M3))


def unpack(words: Tensor, bits: int, count: int, *, dense: bool = True) -> Tensor:
    """Unsigned numbers, int32 [rows, count], of int32 words [rows, W] that hold them, lowest bits first.

    Unless `dense`, no number stands in two words.
    """
    each = torch.arange(count)
    places = each * bits if dense else each // (32 // bits) * 32 + each % (32 // bits) * bits
    word, offset = places // 32, places % 32
    wide = words.to(torch.int64) & 0xFFFFFFFF
    low = wide[:, word] >> offset
    if dense and 32 % bits:  # some numbers stand in two words
        high = wide[:, (word + 1).clamp_max(words.shape[1] - 1)] << (32 - offset)
        low = torch.where(offset + bits > 32, low | high, low)
    return (low & ((1 << bits) - 1)).to(torch.int32)


def unpack_planes(words: Tensor, bits: int, count: int) -> Tensor:
    """As `unpack`, of numbers whose lowest 4 (of 3 bits 2), next 2 and last bit stand in words of their own.

    Each 32 numbers take `bits` words.
    """
    found, word = torch.zeros(len(words), count, dtype=torch.int32), 0
    place = 0
    while place < bits:
        width = next(each for each in (4, 2, 1) if each <= bits - place)
        plane = words.unflatten(1, (-1, bits))[:, :, word : word + width].flatten(1)
        found |= unpack(plane, width, count) << place
        word, place = word + width, place + width
    return found


def nibbles(packed: Tensor, *, high_first: bool = False) -> Tensor:
    """uint8 [..., n] -> uint8 [..., 2n]: the two halves of each byte, one after the other."""
    low, high = packed & 15, packed >> 4
    return torch.stack((high, low) if high_first else (low, high), dim=-1).flatten(-2)


def look_up(codes: Tensor, table: Sequence[float] | Tensor) -> Tensor:
    """The numbers that codes stand for, float32."""
    return torch.as_tensor(table, dtype=torch.float32)[codes.to(torch.int32)]


def spread(scales: Tensor, shape: Sequence[int], blocks: Sequence[int | None] = ()) -> Tensor:
    """Scales [..., a, b] out to `shape` [..., O, I]: each is shared by a block, of O / a by I / b unless told.

    Raises ValueError for scales that do not cover the shape.
    """
    for offset in range(1, min(len(shape), 2) + 1):
        axis = len(shape) - offset
        size, found = shape[axis], scales.shape[axis]
        if found in (1, size):
            continue
        given = blocks[-offset] if len(blocks) >= offset else None
        block = given or -(-size // found)
        if -(-size // block) != found:
            raise ValueError(f"{found} scales in blocks of {block} do not cover {size}")
        scales = scales.repeat_interleave(block, dim=axis).narrow(axis, 0, size)
    return scales


def power_of_two(exponents: Tensor) -> Tensor:
    """uint8 exponents with a bias of 127 (E8M0) -> float32."""
    return torch.ldexp(torch.ones(exponents.shape), exponents.to(torch.int32) - 127)
