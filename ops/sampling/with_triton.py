"""Choice of tokens in Triton: exact, without a sort, with several programs per row and a fixed number of launches.

Each limit keeps a prefix of the ranking, and the drawn token is the last one of the shortest prefix whose mass reaches
a number. Four kernels find it:

1. `_peak_kernel` finds the largest and the smallest finite logit of each part of a row.
2. `_count_kernel` counts the tokens of each part in `BINS` bins. A bin is a range of exponents, (peak - x) /
   temperature, so its width bounds the weights in it. The kernel also sums the weights of the part exactly.
3. `_gather_kernel` copies the tokens of the first bins, as many bins as certainly contain every token that the limits
   keep, to a list in the order of their ids.
4. `_draw_kernel` applies the limits to this list by bisection over the bits of the logits, which have the order of the
   floats, and then by counting equal logits in the order of their ids. A list that would be longer than `MAX_HELD`
   (flat distributions) is not made in step 3. In this case the bins bound the last token of each limit, and this kernel
   lists the few bins in between. If even these have too many tokens, it reads all logits in each step of the bisection.

Only sums of integers decide, so the result does not depend on the number of parts. Weights equal `native`'s except for
the last bits of exp, so a token may differ if a limit or a uniform number is within about 2**-22 of a boundary.
"""

# Pyright cannot check the arguments of kernel launches or the types of reductions.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.backends import SAMPLING
from ops.sampling import Masks, SamplingArrays
from ops.sampling.fallback import native_for_other_limits
from ops.sampling.native import HALF_STEP, fraction_bits
from ops.sampling.triton_logits import apply_bitmask, penalize, score, weight_of

__all__ = ["apply_bitmask", "choose", "penalize", "score"]

BLOCK = 2048  # logits per iteration of a program
MAX_HELD = 8192  # tokens of a row that are listed
HELD_BLOCK = 1024  # listed tokens per iteration of a program
PROGRAMS = 256  # approximate number of programs of all rows: about two per multiprocessor
MAX_PARTS = tl.constexpr(32)
BINS = tl.constexpr(256)
MIDDLE = tl.constexpr(HALF_STEP)
# All tokens whose exponent (peak - x) / temperature is above this share the last bin. exp(-34) is about 2**-49.
MAX_EXPONENT = tl.constexpr(34.0)
# Bounds on the weights in a bin are widened by this factor, because exp and the exponents at its edges are rounded.
SLACK = tl.constexpr(2.0**-15)


@native_for_other_limits(SAMPLING["triton"].limits)
def choose(
    logits: Tensor,
    arrays: SamplingArrays,
    host: SamplingArrays | None = None,
    masks: Masks | None = None,
) -> tuple[Tensor, Tensor]:
    """Pick one token per row (see `ops.sampling`)."""
    if masks is not None:
        apply_bitmask(logits, *masks)
    num_rows, vocab_size = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    device, block = logits.device, min(BLOCK, triton.next_power_of_2(vocab_size))

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(num_rows, *shape, dtype=dtype, device=device)

    num_parts = _num_parts(num_rows, triton.cdiv(vocab_size, block))
    part_size = triton.cdiv(triton.cdiv(vocab_size, block), num_parts) * block
    peaks, best_ids = empty(2, MAX_PARTS.value, dtype=torch.float32), empty(2, MAX_PARTS.value)
    counts, masses = empty(num_parts, BINS.value), empty(2, MAX_PARTS.value, dtype=torch.int64)
    held, held_weights = empty(2, MAX_HELD), empty(MAX_HELD, dtype=torch.int64)
    ids, sound = empty(dtype=torch.int64), empty(dtype=torch.bool)
    grid, line = (num_rows, num_parts), (logits, logits.stride(0))
    limits = (arrays.greedy, arrays.temperature, arrays.top_k, arrays.top_p, arrays.min_p)
    sizes = {"VOCAB": vocab_size, "BLOCK": block, "num_warps": 8}
    fixed = {"UNIT": 2.0 ** fraction_bits(vocab_size), **sizes}
    _peak_kernel[grid](*line, peaks, best_ids, part_size, **sizes)
    _count_kernel[grid](*line, *limits, peaks, best_ids, counts, masses, part_size, num_parts, **fixed)
    listed = (peaks, best_ids, counts, masses, held, held_weights)
    _gather_kernel[grid](*line, *limits, *listed, part_size, num_parts, MAX_HELD=MAX_HELD, **fixed)
    _draw_kernel[(num_rows,)](
        *line, *limits, arrays.uniform, *listed, ids, sound, part_size, num_parts,
        MAX_HELD=MAX_HELD, HELD_BLOCK=HELD_BLOCK, **fixed,
    )  # fmt: skip
    return ids, sound


def _num_parts(num_rows: int, num_blocks: int) -> int:
    return max(1, min(MAX_PARTS.value, num_blocks, triton.cdiv(PROGRAMS, num_rows)))


@triton.jit(do_not_specialize=["part_size"])  # it depends on the number of rows
def _peak_kernel(
    logits,  # [R, VOCAB]
    stride,
    peaks,  # [R, 2, MAX_PARTS], largest and smallest finite logit of each part
    best_ids,  # [R, 2, MAX_PARTS], lowest id of the largest logit, and number of NaN logits
    part_size,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    line, offsets = logits + row.to(tl.int64) * stride, tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    bottom = tl.full([BLOCK], float("inf"), tl.float32)
    where, num_nan = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    begin = part * part_size
    for base in range(begin, tl.minimum(begin + part_size, VOCAB), BLOCK):
        x = tl.load(line + base + offsets, mask=base + offsets < VOCAB, other=float("-inf"))
        num_nan += (x != x).to(tl.int32)
        is_higher = x > top
        top, where = tl.where(is_higher, x, top), tl.where(is_higher, base + offsets, where)
        bottom = tl.where((x < bottom) & (x > float("-inf")), x, bottom)
    peak = tl.max(top, axis=0)
    out = row * 2 * MAX_PARTS + part
    tl.store(peaks + out, peak)
    tl.store(peaks + out + MAX_PARTS, tl.min(bottom, axis=0))
    tl.store(best_ids + out, tl.min(tl.where(top == peak, where, VOCAB), axis=0))
    tl.store(best_ids + out + MAX_PARTS, tl.sum(num_nan, axis=0))


@triton.jit
def _row_peak(peaks, best_ids, row, num_parts, VOCAB: tl.constexpr):
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
def _bins_per_unit(peak, low, temperature):
    """Return the number of bins per unit of the exponent (peak - x) / temperature."""
    span = tl.minimum(tl.maximum(tl.div_rn(peak - low, temperature), 2.0**-20), MAX_EXPONENT)
    return tl.div_rn(BINS - 1.0, span)


@triton.jit
def _bin_of(x, peak, temperature, scale):
    """Return the bins of logits. A larger logit never has a later bin."""
    return tl.minimum(tl.div_rn(peak - x, temperature) * scale, BINS - 1.0).to(tl.int32)


@triton.jit
def _ordered(x):
    """Return the bits of floats as integers with the same order."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _float_of(ordered):
    """Return the inverse of `_ordered`."""
    bits = ordered.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["part_size", "num_parts"])
def _count_kernel(
    logits,  # [R, VOCAB]
    stride,
    greedy,  # [R] each
    temperature,
    top_k,
    top_p,
    min_p,
    peaks,  # [R, 2, MAX_PARTS]
    best_ids,  # [R, 2, MAX_PARTS]
    counts,  # [R, parts, BINS], number of tokens in each bin
    masses,  # [R, 2, MAX_PARTS], mass of all tokens, and of those whose weight is at least min_p
    part_size,
    num_parts,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,  # fixed-point scale of the weights: 1.0 becomes this integer
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    peak, _, low, is_sound = _row_peak(peaks, best_ids, row, num_parts, VOCAB)
    if (tl.load(greedy + row) != 0) | (is_sound == 0):
        return
    row_temperature, floor = tl.load(temperature + row), tl.load(min_p + row)
    is_ranked = (tl.load(top_k + row) < VOCAB) | (tl.load(top_p + row) < 1.0)
    scale = _bins_per_unit(peak, low, row_temperature)
    line, offsets = logits + row.to(tl.int64) * stride, tl.arange(0, BLOCK)
    mass, kept = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    histogram = tl.zeros([BINS], tl.int32)
    begin = part * part_size
    for base in range(begin, tl.minimum(begin + part_size, VOCAB), BLOCK):
        inside = base + offsets < VOCAB
        x = tl.load(line + base + offsets, mask=inside, other=float("-inf"))
        weight = weight_of(x, peak, row_temperature)
        fixed = (weight * UNIT).to(tl.int64)
        mass += fixed
        kept += tl.where(weight >= floor, fixed, 0)
        if is_ranked:
            histogram += tl.histogram(_bin_of(x, peak, row_temperature, scale), BINS, mask=inside)
    out = row * 2 * MAX_PARTS + part
    tl.store(masses + out, tl.sum(mass, axis=0))
    tl.store(masses + out + MAX_PARTS, tl.sum(kept, axis=0))
    tl.store(counts + (row * num_parts + part) * BINS + tl.arange(0, BINS), histogram)


@triton.jit
def _sum_of_parts(values, row, num_parts):
    """Return the sum over the parts of [R, parts, BINS] for one row, [BINS]."""
    bins = tl.arange(0, BINS)
    total = tl.zeros([BINS], tl.int32)
    for part in range(num_parts):
        total += tl.load(values + (row * num_parts + part) * BINS + bins)
    return total


@triton.jit
def _row_mass(masses, row, num_parts, WHICH: tl.constexpr):
    parts = tl.arange(0, MAX_PARTS)
    return tl.sum(tl.load(masses + (row * 2 + WHICH) * MAX_PARTS + parts, mask=parts < num_parts, other=0), axis=0)


@triton.jit
def _share(limit_p, mass):
    """Return limit_p * mass, rounded up, at least 1."""
    part = limit_p.to(tl.float64) * mass.to(tl.float64)
    whole = part.to(tl.int64)
    whole += (whole.to(tl.float64) < part).to(tl.int64)  # rounded up
    return tl.maximum(whole, 1)


@triton.jit
def _bins_with_mass(count, limit, total, scale, UNIT: tl.constexpr):
    """Return the first and the last bin that may have the token at which the mass reaches `limit`.

    `count` [BINS] is the number of tokens in each bin, `total` the exact mass of all tokens.
    """
    bins = tl.arange(0, BINS)
    per_unit = 1.0 / scale
    upper = tl.exp(-bins.to(tl.float32) * per_unit).to(tl.float64) * ((1.0 + SLACK) * UNIT)
    lower = tl.exp(-(bins + 1).to(tl.float32) * per_unit).to(tl.float64) * ((1.0 - SLACK) * UNIT) - 1.0
    lower = tl.where(bins == BINS - 1, 0.0, tl.maximum(lower, 0.0))
    most, least = upper * count.to(tl.float64), lower * count.to(tl.float64)
    most_to, least_to = tl.cumsum(most, axis=0), tl.cumsum(least, axis=0)
    # The mass that is not in the bins so far gives a second bound.
    whole = total.to(tl.float64)
    rounding = whole * 2.0**-40 + 1.0
    most_to = tl.minimum(most_to, whole - (tl.sum(least, axis=0) - least_to)) + rounding
    least_to = tl.maximum(least_to, whole - (tl.sum(most, axis=0) - most_to)) - rounding
    need = limit.to(tl.float64)
    first = tl.min(tl.where(most_to >= need, bins, BINS - 1), axis=0)
    last = tl.min(tl.where(least_to >= need, bins, BINS - 1), axis=0)
    return first, last


@triton.jit
def _bin_with_count(count, limit):
    """Return the bin of the token number `limit` of the ranking."""
    bins = tl.arange(0, BINS)
    return tl.min(tl.where(tl.cumsum(count, axis=0) >= limit, bins, BINS - 1), axis=0)


@triton.jit
def _last_listed(count, limit_k, limit_p, total, scale, VOCAB: tl.constexpr, UNIT: tl.constexpr):
    """Return a bin so that it and the bins before have all tokens that the limits keep, and those tokens' number."""
    last = tl.cast(BINS - 1, tl.int32)
    if limit_k < VOCAB:
        last = _bin_with_count(count, limit_k)
    elif limit_p < 1.0:
        _, last = _bins_with_mass(count, _share(limit_p, total), total, scale, UNIT)
    return last, tl.sum(tl.where(tl.arange(0, BINS) <= last, count, 0), axis=0)


@triton.jit
def _list_bins(
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
    """List the tokens begin .. end - 1 in the bins first .. last.

    Returns the mass of the tokens in the bins before `first`, if `SUM_ABOVE`.
    """
    offsets, place = tl.arange(0, BLOCK), tl.cast(place, tl.int32)
    above = tl.zeros([BLOCK], tl.int64)
    for base in range(begin, end, BLOCK):
        inside = base + offsets < VOCAB
        x = tl.load(line + base + offsets, mask=inside, other=float("-inf"))
        bins = _bin_of(x, peak, temperature, scale)
        is_in = inside & (bins >= first) & (bins <= last)
        count = tl.sum(is_in.to(tl.int32), axis=0)
        if SUM_ABOVE:
            above += tl.where(bins < first, (weight_of(x, peak, temperature) * UNIT).to(tl.int64), 0)
        if count > 0:
            entry = place + tl.cumsum(is_in.to(tl.int32), axis=0) - 1
            tl.store(keys + entry, _ordered(x), mask=is_in)
            tl.store(ids + entry, base + offsets, mask=is_in)
            tl.store(weights + entry, (weight_of(x, peak, temperature) * UNIT).to(tl.int64), mask=is_in)
            place += count
    return tl.sum(above, axis=0)


@triton.jit(do_not_specialize=["part_size", "num_parts"])
def _gather_kernel(
    logits,  # [R, VOCAB]
    stride,
    greedy,  # [R] each
    temperature,
    top_k,
    top_p,
    min_p,
    peaks,  # [R, 2, MAX_PARTS]
    best_ids,  # [R, 2, MAX_PARTS]
    counts,  # [R, parts, BINS]
    masses,  # [R, 2, MAX_PARTS]
    held,  # [R, 2, MAX_HELD], ordered bits and ids of the listed tokens
    held_weights,  # [R, MAX_HELD]
    part_size,
    num_parts,
    MAX_HELD: tl.constexpr,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    peak, _, low, is_sound = _row_peak(peaks, best_ids, row, num_parts, VOCAB)
    limit_k, limit_p = tl.load(top_k + row), tl.load(top_p + row)
    is_ranked = (limit_k < VOCAB) | (limit_p < 1.0)
    if (tl.load(greedy + row) != 0) | (is_sound == 0) | (is_ranked == 0):
        return
    row_temperature = tl.load(temperature + row)
    scale, total = _bins_per_unit(peak, low, row_temperature), _row_mass(masses, row, num_parts, 0)
    count = _sum_of_parts(counts, row, num_parts)
    last, num_listed = _last_listed(count, limit_k, limit_p, total, scale, VOCAB, UNIT)
    if num_listed > MAX_HELD:
        return
    bins = tl.arange(0, BINS)
    before = tl.zeros([BINS], tl.int32)
    for other in range(part):
        before += tl.load(counts + (row * num_parts + other) * BINS + bins)
    place = tl.sum(tl.where(bins <= last, before, 0), axis=0)
    line, begin = logits + row.to(tl.int64) * stride, part * part_size
    keys = held + row.to(tl.int64) * 2 * MAX_HELD
    _list_bins(
        line, begin, tl.minimum(begin + part_size, VOCAB), 0, last, place, peak, row_temperature, scale,
        keys, keys + MAX_HELD, held_weights + row.to(tl.int64) * MAX_HELD, False, VOCAB, UNIT, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["part_size", "num_parts"])
def _draw_kernel(
    logits,  # [R, VOCAB]
    stride,
    greedy,  # [R] each
    temperature,
    top_k,
    top_p,
    min_p,
    uniform,
    peaks,  # [R, 2, MAX_PARTS]
    best_ids,  # [R, 2, MAX_PARTS]
    counts,  # [R, parts, BINS]
    masses,  # [R, 2, MAX_PARTS]
    held,  # [R, 2, MAX_HELD]
    held_weights,  # [R, MAX_HELD]
    ids,  # [R]
    sound,  # [R]
    part_size,
    num_parts,
    MAX_HELD: tl.constexpr,
    HELD_BLOCK: tl.constexpr,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    peak, best_id, low, is_sound = _row_peak(peaks, best_ids, row, num_parts, VOCAB)
    tl.store(sound + row, is_sound)
    if (tl.load(greedy + row) != 0) | (is_sound == 0):
        tl.store(ids + row, tl.where(is_sound, best_id, 0))
        return

    line = logits + row.to(tl.int64) * stride
    row_temperature, floor = tl.load(temperature + row), tl.load(min_p + row)
    limit_k, limit_p = tl.load(top_k + row), tl.load(top_p + row)
    mass = _row_mass(masses, row, num_parts, 1)  # of the tokens that min_p keeps
    if (limit_k >= VOCAB) & (limit_p >= 1.0):
        target = _target(uniform, row, mass)
        drawn = _first_above(
            line, masses, row, target, part_size, num_parts, peak, row_temperature, floor, VOCAB, UNIT, BLOCK
        )
        tl.store(ids + row, drawn)
        return

    total = _row_mass(masses, row, num_parts, 0)
    scale, count = _bins_per_unit(peak, low, row_temperature), _sum_of_parts(counts, row, num_parts)
    _last_bin, num_listed = _last_listed(count, limit_k, limit_p, total, scale, VOCAB, UNIT)
    keys = held + row.to(tl.int64) * 2 * MAX_HELD
    weights = held_weights + row.to(tl.int64) * MAX_HELD
    prefix_mass, least = total, tl.cast(0.0, tl.float32)  # mass of the kept prefix, and weight of its last token
    drawn = tl.cast(0, tl.int32)
    for stage in range(3):  # top_k, top_p, the drawn token
        if (stage == 2) | ((stage == 0) & (limit_k < VOCAB)) | ((stage == 1) & (limit_p < 1.0)):
            limit = limit_k.to(tl.int64)
            if stage == 1:
                limit = _share(limit_p, prefix_mass)
            if stage == 2:
                # If min_p ends within the prefix, it alone decides.
                limit = _target(uniform, row, tl.where(floor > least, mass, prefix_mass)) + 1
            drawn, least, prefix_mass = _shortest_prefix(
                limit, stage > 0, line, count, num_listed, total, peak, row_temperature, scale, keys, weights,
                MAX_HELD, HELD_BLOCK, VOCAB, UNIT, BLOCK,
            )  # fmt: skip
    tl.store(ids + row, drawn)


@triton.jit
def _target(uniform, row, mass):
    """Return the mass that the drawn token's prefix must exceed."""
    target = ((tl.load(uniform + row).to(tl.float64) + MIDDLE) * mass.to(tl.float64)).to(tl.int64)
    return tl.minimum(target, mass - 1)  # the product may have been rounded up


@triton.jit
def _shortest_prefix(
    limit,  # at least 1, at most the total of all tokens
    by_mass,  # whether `limit` is a mass, not a number of tokens
    line,
    count,  # [BINS], number of tokens in each bin
    num_listed,  # number of tokens that `_gather_kernel` has listed; above MAX_HELD: none
    total,  # mass of all tokens
    peak,
    temperature,
    scale,
    keys,  # [MAX_HELD], [2 * MAX_HELD] with the ids
    weights,  # [MAX_HELD]
    MAX_HELD: tl.constexpr,
    HELD_BLOCK: tl.constexpr,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return (id, weight) of the last token of the shortest prefix that reaches `limit`, and the prefix's mass."""
    listed = num_listed
    above, mass_above = tl.cast(0, tl.int64), tl.cast(0, tl.int64)  # in `limit`'s unit, and mass, before the list
    if num_listed > MAX_HELD:
        first, last = _bins_with_mass(count, limit, total, scale, UNIT)
        if not by_mass:
            first = _bin_with_count(count, limit)
            last = first
        bins = tl.arange(0, BINS)
        listed = tl.sum(tl.where((bins >= first) & (bins <= last), count, 0), axis=0)
        if listed <= MAX_HELD:
            tl.debug_barrier()  # the previous list may still be in use
            mass_above = _list_bins(
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
    return token_id, weight_of(_float_of(key), peak, temperature), mass


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
    """Return (whether the entry exists, ordered bits, weight in fixed point) of entries base .. base + BLOCK - 1."""
    entries = base + tl.arange(0, BLOCK)
    inside = entries < end
    if LISTED:
        key = tl.load(keys + entries, mask=inside, other=-(2**31))
        fixed = tl.load(weights + entries, mask=inside, other=0)
    else:
        x = tl.load(line + entries, mask=inside, other=float("-inf"))
        key, fixed = _ordered(x), (weight_of(x, peak, temperature) * UNIT).to(tl.int64)
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

    Tokens that are not among the entries are ignored. The entries are in the order of ids.
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
    rank,  # number or mass to take from the tokens with these bits
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
    """Return the result of `_search`, whose last token is among those with the bits `last`."""
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
def _first_above(
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
