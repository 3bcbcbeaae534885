"""Triton functions that sort a row's logits into bins, bound the mass of bins, and list the tokens of bins.

`with_triton.py` describes the method.
"""

# Pyright cannot check the arguments of kernel launches or the types of reductions.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import triton
import triton.language as tl

from ops.sampling.triton_logits import weight_of

MAX_PARTS = tl.constexpr(32)
BINS = tl.constexpr(256)
# Tokens whose exponent (peak - x) / temperature is above this value are all in the last bin. exp(-34) is about 2**-49.
MAX_EXPONENT = tl.constexpr(34.0)
# Bounds on the weights in a bin are widened by this share, because the exponents at its edges and exp are rounded.
SLACK = tl.constexpr(2.0**-15)


@triton.jit
def row_peak(peaks, best_ids, row, num_parts, VOCAB: tl.constexpr):
    """Return a row's largest logit, its lowest id, its smallest finite logit, and whether the row is sound."""
    parts = tl.arange(0, MAX_PARTS)
    inside, out = parts < num_parts, row * 2 * MAX_PARTS + parts
    tops = tl.load(peaks + out, mask=inside, other=float("-inf"))
    peak = tl.max(tops, axis=0)
    low = tl.min(tl.load(peaks + out + MAX_PARTS, mask=inside, other=float("inf")), axis=0)
    best_id = tl.min(tl.where(tops == peak, tl.load(best_ids + out, mask=inside, other=VOCAB), VOCAB), axis=0)
    num_nan = tl.sum(tl.load(best_ids + out + MAX_PARTS, mask=inside, other=0), axis=0)
    return peak, best_id, low, (num_nan == 0) & (tl.abs(peak) < float("inf"))


@triton.jit
def bins_per_unit(peak, low, temperature):
    """Return the number of bins per unit of the exponent (peak - x) / temperature."""
    span = tl.minimum(tl.maximum(tl.div_rn(peak - low, temperature), 2.0**-20), MAX_EXPONENT)
    return tl.div_rn(BINS - 1.0, span)


@triton.jit
def bin_of(x, peak, temperature, scale):
    """Return the bin of each logit x. Bins are monotonic: a larger logit is in the same bin or in an earlier one."""
    return tl.minimum(tl.div_rn(peak - x, temperature) * scale, BINS - 1.0).to(tl.int32)


@triton.jit
def ordered_bits(x):
    """Return the bits of float32 numbers as int32 numbers that are in the same order."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def float_of(ordered):
    """Return the inverse of `ordered_bits`."""
    bits = ordered.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def sum_of_parts(values, row, num_parts):
    """Return the sum of `values` [R, parts, BINS] over the parts of one row, [BINS]."""
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for part in range(num_parts):
        total += tl.load(values + (row * num_parts + part) * BINS + bins)
    return total


@triton.jit
def row_mass(masses, row, num_parts, WHICH: tl.constexpr):
    parts = tl.arange(0, MAX_PARTS)
    return tl.sum(tl.load(masses + (row * 2 + WHICH) * MAX_PARTS + parts, mask=parts < num_parts, other=0), axis=0)


@triton.jit
def share(limit_p, mass):
    """Return the mass limit_p * mass, rounded up, at least 1."""
    part = limit_p.to(tl.float64) * mass.to(tl.float64)
    whole = part.to(tl.int64)
    whole += (whole.to(tl.float64) < part).to(tl.int64)  # rounded up
    return tl.maximum(whole, 1)


@triton.jit
def bins_with_mass(count, limit, total, scale, UNIT: tl.constexpr):
    """Return (first, last) of the bins that may contain the token at which the cumulative mass reaches `limit`.

    `count` [BINS] is the number of tokens in each bin, and `total` is the exact mass of all tokens.
    """
    bins = tl.arange(0, BINS)
    per_unit = 1.0 / scale
    upper = tl.exp(-bins.to(tl.float32) * per_unit).to(tl.float64) * ((1.0 + SLACK) * UNIT)
    lower = tl.exp(-(bins + 1).to(tl.float32) * per_unit).to(tl.float64) * ((1.0 - SLACK) * UNIT) - 1.0
    lower = tl.where(bins == BINS - 1, 0.0, tl.maximum(lower, 0.0))
    most, least = upper * count.to(tl.float64), lower * count.to(tl.float64)
    most_to, least_to = tl.cumsum(most, axis=0), tl.cumsum(least, axis=0)
    # A second bound: the exact total minus the bounds on the mass of the later bins.
    whole = total.to(tl.float64)
    rounding = whole * 2.0**-40 + 1.0
    most_to = tl.minimum(most_to, whole - (tl.sum(least, axis=0) - least_to)) + rounding
    least_to = tl.maximum(least_to, whole - (tl.sum(most, axis=0) - most_to)) - rounding
    need = limit.to(tl.float64)
    first = tl.min(tl.where(most_to >= need, bins, BINS - 1), axis=0)
    last = tl.min(tl.where(least_to >= need, bins, BINS - 1), axis=0)
    return first, last


@triton.jit
def bin_with_count(count, limit):
    """Return the bin of the token with rank `limit`, counted from 1."""
    bins = tl.arange(0, BINS)
    return tl.min(tl.where(tl.cumsum(count, axis=0) >= limit, bins, BINS - 1), axis=0)


@triton.jit
def last_listed(count, limit_k, limit_p, total, scale, VOCAB: tl.constexpr, UNIT: tl.constexpr):
    """Return (last, count): the bins 0 .. last have `count` tokens, among them all tokens that the limits keep."""
    last = tl.cast(BINS - 1, tl.int32)
    if limit_k < VOCAB:
        last = bin_with_count(count, limit_k)
    elif limit_p < 1.0:
        _, last = bins_with_mass(count, share(limit_p, total), total, scale, UNIT)
    return last, tl.sum(tl.where(tl.arange(0, BINS) <= last, count, 0), axis=0)


@triton.jit
def list_bins(
    line,
    begin,
    end,
    first,
    last,
    place,  # index of the first token's entry in the list
    peak,
    temperature,
    scale,
    keys,  # [MAX_HELD] each, the row's list
    ids,
    weights,
    SUM_ABOVE: tl.constexpr,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add tokens to the row's list: those of the ids begin .. end - 1 that are in the bins first .. last.

    With `SUM_ABOVE`, returns the mass of the tokens in the bins before `first`; otherwise 0.
    """
    offsets, place = tl.arange(0, BLOCK), tl.cast(place, tl.int32)
    above = tl.zeros([BLOCK], tl.int64)
    for base in range(begin, end, BLOCK):
        inside = base + offsets < VOCAB
        x = tl.load(line + base + offsets, mask=inside, other=float("-inf"))
        bins = bin_of(x, peak, temperature, scale)
        is_in = inside & (bins >= first) & (bins <= last)
        count = tl.sum(is_in.to(tl.int32), axis=0)
        if SUM_ABOVE:
            above += tl.where(bins < first, (weight_of(x, peak, temperature) * UNIT).to(tl.int64), 0)
        if count > 0:
            entry = place + tl.cumsum(is_in.to(tl.int32), axis=0) - 1
            tl.store(keys + entry, ordered_bits(x), mask=is_in)
            tl.store(ids + entry, base + offsets, mask=is_in)
            tl.store(weights + entry, (weight_of(x, peak, temperature) * UNIT).to(tl.int64), mask=is_in)
            place += count
    return tl.sum(above, axis=0)
