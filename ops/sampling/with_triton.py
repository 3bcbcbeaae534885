"""Choice of tokens in Triton: exact, without a sort, with several programs per row and a fixed number of launches.

Each limit keeps a prefix of the ranking. The drawn token is the last token of the shortest prefix whose mass reaches a
random target. Four kernels find it:

1. `_peak_kernel` finds the largest and the smallest finite logit of each part of a row.
2. `_count_kernel` counts the tokens of each part in `BINS` bins. A bin is a range of exponents, (peak - x) /
   temperature, so the edges of a bin bound the weights in it. The kernel also sums the weights of the part exactly.
3. `_gather_kernel` copies the tokens of the first bins to a list in the order of their ids. These bins
   contain every token that the limits keep.
4. `_draw_kernel` applies the limits to this list. It bisects over the bits of the logits, which as integers have the
   same order as the floats, and then counts equal logits in the order of their ids.

In a flat distribution, the list could be longer than `MAX_HELD`. Step 3 then makes no list. Instead, step 4 finds, for
each limit, the few bins that may contain its last token, and lists only their tokens. If these are also too many, each
iteration of the bisection reads all logits.

Only sums of integers determine the result, so it does not depend on the number of parts. The weights may differ from
those of `native` in the last bits of exp. Therefore the chosen token may differ from that of `native` if a limit or a
uniform number is within about 2**-22 of a boundary between two tokens.
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
from ops.sampling.native import fraction_bits
from ops.sampling.triton_bins import (
    BINS,
    MAX_PARTS,
    bin_of,
    bins_per_unit,
    last_listed,
    list_bins,
    row_mass,
    row_peak,
    share,
    sum_of_parts,
)
from ops.sampling.triton_logits import apply_bitmask, penalize, score, weight_of
from ops.sampling.triton_search import first_above, shortest_prefix, target_of

__all__ = ["apply_bitmask", "choose", "penalize", "score"]

BLOCK = 2048  # logits per iteration of a program
MAX_HELD = 8192  # maximum number of listed tokens of a row
HELD_BLOCK = 1024  # listed tokens per iteration of a program
PROGRAMS = 256  # approximate number of programs of all rows: about two per multiprocessor


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


# `part_size` depends on the number of rows. Triton would compile further variants for the value 1 and multiples of 16.
@triton.jit(do_not_specialize=["part_size"])
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
    masses,  # [R, 2, MAX_PARTS], mass of all tokens of a part, and of its tokens whose weight is at least min_p
    part_size,
    num_parts,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,  # fixed-point scale of the weights: 1.0 becomes this integer
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    peak, _, low, is_sound = row_peak(peaks, best_ids, row, num_parts, VOCAB)
    if (tl.load(greedy + row) != 0) | (is_sound == 0):
        return
    row_temperature, floor = tl.load(temperature + row), tl.load(min_p + row)
    is_ranked = (tl.load(top_k + row) < VOCAB) | (tl.load(top_p + row) < 1.0)
    scale = bins_per_unit(peak, low, row_temperature)
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
            histogram += tl.histogram(bin_of(x, peak, row_temperature, scale), BINS, mask=inside)
    out = row * 2 * MAX_PARTS + part
    tl.store(masses + out, tl.sum(mass, axis=0))
    tl.store(masses + out + MAX_PARTS, tl.sum(kept, axis=0))
    tl.store(counts + (row * num_parts + part) * BINS + tl.arange(0, BINS), histogram)


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
    held,  # [R, 2, MAX_HELD], `ordered_bits` of the listed tokens' logits, and their ids
    held_weights,  # [R, MAX_HELD]
    part_size,
    num_parts,
    MAX_HELD: tl.constexpr,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    peak, _, low, is_sound = row_peak(peaks, best_ids, row, num_parts, VOCAB)
    limit_k, limit_p = tl.load(top_k + row), tl.load(top_p + row)
    is_ranked = (limit_k < VOCAB) | (limit_p < 1.0)
    if (tl.load(greedy + row) != 0) | (is_sound == 0) | (is_ranked == 0):
        return
    row_temperature = tl.load(temperature + row)
    scale, total = bins_per_unit(peak, low, row_temperature), row_mass(masses, row, num_parts, 0)
    count = sum_of_parts(counts, row, num_parts)
    last, num_listed = last_listed(count, limit_k, limit_p, total, scale, VOCAB, UNIT)
    if num_listed > MAX_HELD:
        return
    bins = tl.arange(0, BINS)
    before = tl.zeros([BINS], tl.int32)
    for other in range(part):
        before += tl.load(counts + (row * num_parts + other) * BINS + bins)
    place = tl.sum(tl.where(bins <= last, before, 0), axis=0)
    line, begin = logits + row.to(tl.int64) * stride, part * part_size
    keys = held + row.to(tl.int64) * 2 * MAX_HELD
    list_bins(
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
    peak, best_id, low, is_sound = row_peak(peaks, best_ids, row, num_parts, VOCAB)
    tl.store(sound + row, is_sound)
    if (tl.load(greedy + row) != 0) | (is_sound == 0):
        tl.store(ids + row, tl.where(is_sound, best_id, 0))
        return

    line = logits + row.to(tl.int64) * stride
    row_temperature, floor = tl.load(temperature + row), tl.load(min_p + row)
    limit_k, limit_p = tl.load(top_k + row), tl.load(top_p + row)
    mass = row_mass(masses, row, num_parts, 1)  # of the tokens that min_p keeps
    if (limit_k >= VOCAB) & (limit_p >= 1.0):
        target = target_of(uniform, row, mass)
        drawn = first_above(
            line, masses, row, target, part_size, num_parts, peak, row_temperature, floor, VOCAB, UNIT, BLOCK
        )
        tl.store(ids + row, drawn)
        return

    total = row_mass(masses, row, num_parts, 0)
    scale, count = bins_per_unit(peak, low, row_temperature), sum_of_parts(counts, row, num_parts)
    _last_bin, num_listed = last_listed(count, limit_k, limit_p, total, scale, VOCAB, UNIT)
    keys = held + row.to(tl.int64) * 2 * MAX_HELD
    weights = held_weights + row.to(tl.int64) * MAX_HELD
    prefix_mass, least = total, tl.cast(0.0, tl.float32)  # mass of the kept prefix, and weight of its last token
    drawn = tl.cast(0, tl.int32)
    for stage in range(3):  # top_k, top_p, the drawn token
        if (stage == 2) | ((stage == 0) & (limit_k < VOCAB)) | ((stage == 1) & (limit_p < 1.0)):
            limit = limit_k.to(tl.int64)
            if stage == 1:
                limit = share(limit_p, prefix_mass)
            if stage == 2:
                # If min_p keeps fewer tokens than the prefix has, min_p alone limits the draw.
                limit = target_of(uniform, row, tl.where(floor > least, mass, prefix_mass)) + 1
            drawn, least, prefix_mass = shortest_prefix(
                limit, stage > 0, line, count, num_listed, total, peak, row_temperature, scale, keys, weights,
                MAX_HELD, HELD_BLOCK, VOCAB, UNIT, BLOCK,
            )  # fmt: skip
    tl.store(ids + row, drawn)
