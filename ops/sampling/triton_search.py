"""Triton functions that find the last token of the shortest prefix of a ranking with a given mass or number of tokens.

`with_triton.py` describes the method.
"""

# Pyright cannot check the arguments of kernel launches or the types of reductions.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from ops.sampling.native import HALF_STEP
from ops.sampling.triton_bins import (
    BINS,
    MAX_PARTS,
    bin_with_count,
    bins_with_mass,
    float_of,
    list_bins,
    ordered_bits,
)
from ops.sampling.triton_logits import weight_of

MIDDLE = tl.constexpr(HALF_STEP)


@triton.jit
def target_of(uniform, row, mass):
    """Return the drawn mass. The drawn token is the first in the ranking whose cumulative mass exceeds it."""
    target = ((tl.load(uniform + row).to(tl.float64) + MIDDLE) * mass.to(tl.float64)).to(tl.int64)
    return tl.minimum(target, mass - 1)  # the product may have been rounded up


@triton.jit
def shortest_prefix(
    limit,  # at least 1, at most the total of all tokens
    by_mass,  # whether `limit` is a mass, not a number of tokens
    line,
    count,  # [BINS], number of tokens in each bin
    num_listed,  # number of tokens that the list should have; if it is above MAX_HELD, the list is empty
    total,  # mass of all tokens
    peak,
    temperature,
    scale,
    keys,  # [2 * MAX_HELD], ordered bits of the listed tokens, then their ids
    weights,  # [MAX_HELD]
    MAX_HELD: tl.constexpr,
    HELD_BLOCK: tl.constexpr,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return (id, weight) of the last token of the shortest prefix that reaches `limit`, and the prefix's mass."""
    listed = num_listed
    # Number (or mass, if `by_mass`) of the tokens that are ranked before the listed ones, and their mass.
    above, mass_above = tl.cast(0, tl.int64), tl.cast(0, tl.int64)
    if num_listed > MAX_HELD:
        first, last = bins_with_mass(count, limit, total, scale, UNIT)
        if not by_mass:
            first = bin_with_count(count, limit)
            last = first
        bins = tl.arange(0, BINS)
        listed = tl.sum(tl.where((bins >= first) & (bins <= last), count, 0), axis=0)
        if listed <= MAX_HELD:
            tl.debug_barrier()  # the previous list may still be in use
            mass_above = list_bins(
                line, 0, VOCAB, first, last, 0, peak, temperature, scale, keys, keys + MAX_HELD, weights,
                True, VOCAB, UNIT, BLOCK,
            )  # fmt: skip
            tl.debug_barrier()
            above = mass_above
            if not by_mass:
                above = tl.sum(tl.where(bins < first, count, 0), axis=0).to(tl.int64)
    if listed <= MAX_HELD:
        token_id, key, mass = _search(
            limit - above, by_mass, True, line, peak, temperature, keys, weights, listed,
            MAX_HELD, VOCAB, UNIT, HELD_BLOCK,
        )  # fmt: skip
        mass += mass_above
    else:
        token_id, key, mass = _search(
            limit, by_mass, False, line, peak, temperature, keys, weights, VOCAB, MAX_HELD, VOCAB, UNIT, BLOCK
        )
    return token_id, weight_of(float_of(key), peak, temperature), mass


@triton.jit
def _token(
    base,
    LISTED: tl.constexpr,
    line,
    peak,
    temperature,
    keys,
    weights,
    end,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return (whether it exists, ordered bits, weight in fixed point) of the entries from `base` on, [BLOCK]."""
    entries = base + tl.arange(0, BLOCK)
    inside = entries < end
    if LISTED:
        key = tl.load(keys + entries, mask=inside, other=-(2**31))
        fixed = tl.load(weights + entries, mask=inside, other=0)
    else:
        x = tl.load(line + entries, mask=inside, other=float("-inf"))
        key, fixed = ordered_bits(x), (weight_of(x, peak, temperature) * UNIT).to(tl.int64)
    return inside, key, fixed


@triton.jit
def _search(
    limit,
    by_mass,
    LISTED: tl.constexpr,  # whether to search the list in `keys` and `weights` instead of the logits in `line`
    line,
    peak,
    temperature,
    keys,
    weights,
    end,  # number of entries
    MAX_HELD: tl.constexpr,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return (id, ordered bits) of the last token of the shortest prefix that reaches `limit`, and the prefix's mass.

    Only the listed tokens (with `LISTED`) or all tokens of the row are ranked. Entries are in the order of ids.
    """
    lowest, highest = tl.full([BLOCK], 2**31 - 1, tl.int32), tl.full([BLOCK], -(2**31), tl.int32)
    for base in range(0, end, BLOCK):
        inside, key, _ = _token(base, LISTED, line, peak, temperature, keys, weights, end, UNIT, BLOCK)
        lowest, highest = tl.minimum(lowest, tl.where(inside, key, 2**31 - 1)), tl.maximum(highest, key)
    low, high = tl.min(lowest, axis=0).to(tl.int64), tl.max(highest, axis=0).to(tl.int64) + 1
    above = tl.cast(0, tl.int64)  # number or mass of the tokens whose bits are at least `high`
    while high - low > 1:
        middle = (low + high) >> 1
        sums = tl.zeros([BLOCK], tl.int64)
        for base in range(0, end, BLOCK):
            inside, key, fixed = _token(base, LISTED, line, peak, temperature, keys, weights, end, UNIT, BLOCK)
            sums += tl.where(inside & (key >= middle), tl.where(by_mass, fixed, 1), 0)
        reached = tl.sum(sums, axis=0)
        if reached >= limit:
            low = middle
        else:
            high = middle
            above = reached
    return _among_equals(
        low, limit - above, by_mass, LISTED, line, peak, temperature, keys, weights, end, MAX_HELD, VOCAB, UNIT, BLOCK
    )


@triton.jit
def _among_equals(
    last,  # ordered bits of the last token
    rank,  # number of the tokens with these bits (or their mass, if `by_mass`) that the prefix takes
    by_mass,
    LISTED: tl.constexpr,
    line,
    peak,
    temperature,
    keys,
    weights,
    end,
    MAX_HELD: tl.constexpr,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finish `_search`: find the last token of the prefix among the tokens with the bits `last`. Return the same."""
    above, weight = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    for base in range(0, end, BLOCK):
        inside, key, fixed = _token(base, LISTED, line, peak, temperature, keys, weights, end, UNIT, BLOCK)
        above += tl.where(inside & (key > last), fixed, 0)
        weight = tl.maximum(weight, tl.where(inside & (key == last), fixed, 0))
    each = tl.max(weight, axis=0)
    if by_mass:
        rank = (rank + each - 1) // each
    before, entry = tl.cast(0, tl.int64), tl.cast(end - 1, tl.int32)
    for base in range(0, end, BLOCK):
        inside, key, _ = _token(base, LISTED, line, peak, temperature, keys, weights, end, UNIT, BLOCK)
        is_equal = (inside & (key == last)).to(tl.int32)
        count = tl.sum(is_equal, axis=0)
        if (before < rank) & (before + count >= rank):
            is_it = (is_equal == 1) & (before + tl.cumsum(is_equal, axis=0) == rank)
            entry = tl.min(tl.where(is_it, base + tl.arange(0, BLOCK), end), axis=0)
        before += count
    token_id = entry
    if LISTED:
        token_id = tl.load(keys + MAX_HELD + entry)
    return token_id, last, tl.sum(above, axis=0) + rank * each


@triton.jit
def first_above(
    line,
    masses,  # [R, 2, MAX_PARTS]
    row,
    target,
    part_size,
    num_parts,
    peak,
    temperature,
    floor,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the first id at which the cumulative mass of tokens with at least the weight `floor` exceeds `target`."""
    parts, offsets = tl.arange(0, MAX_PARTS), tl.arange(0, BLOCK)
    of_part = tl.load(masses + (row * 2 + 1) * MAX_PARTS + parts, mask=parts < num_parts, other=0)
    mass_to = tl.cumsum(of_part, axis=0)
    part = tl.min(tl.where(mass_to > target, parts, MAX_PARTS), axis=0)
    before = tl.sum(tl.where(parts < part, of_part, 0), axis=0)
    token_id = tl.cast(VOCAB - 1, tl.int32)
    begin = part * part_size
    for base in range(begin, tl.minimum(begin + part_size, VOCAB), BLOCK):
        x = tl.load(line + base + offsets, mask=base + offsets < VOCAB, other=float("-inf"))
        weight = weight_of(x, peak, temperature)
        fixed = tl.where(weight >= floor, (weight * UNIT).to(tl.int64), 0)
        mass = tl.sum(fixed, axis=0)
        if (before <= target) & (before + mass > target):
            is_above = before + tl.cumsum(fixed, axis=0) > target
            token_id = tl.min(tl.where(is_above, base + offsets, VOCAB), axis=0)
        before += mass
    return token_id
