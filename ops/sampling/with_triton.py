"""Sampling in Triton: one program per row, without a sort or a second copy of the logits.

Each limit keeps a prefix of the ranking, and the drawn token is the last one of the shortest prefix whose mass reaches
a number. The kernel finds a prefix by bisection over the bits of the logits, which have the order of the floats, and
then by counting equal logits in the order of their ids. (The idea of pivots instead of a sort is from
flashinfer.ai/2025/03/10/sampling.html; here the search is exact.)

Weights equal `native`'s except for the last bits of exp, so a token may differ if a limit or a uniform number is
within about 2**-22 of a boundary.
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
from ops.sampling import Masks, SamplingArrays, Scores
from ops.sampling.fallback import native_for_other_limits
from ops.sampling.native import HALF_STEP, best, fraction_bits

BLOCK = 4096  # logits per iteration of a program
MIDDLE = tl.constexpr(HALF_STEP)


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
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    sound = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    _choose_kernel[(num_rows,)](
        logits,
        arrays.greedy,
        arrays.temperature,
        arrays.top_k,
        arrays.top_p,
        arrays.min_p,
        arrays.uniform,
        ids,
        sound,
        logits.stride(0),
        VOCAB=vocab_size,
        UNIT=2.0 ** fraction_bits(vocab_size),
        BLOCK=_block(vocab_size),
        num_warps=8,
    )
    return ids, sound


def penalize(
    logits: Tensor,
    rows: Tensor,
    counted: Tensor,
    counts: Tensor,
    in_prompt: Tensor,
    frequency: Tensor,
    presence: Tensor,
    repetition: Tensor,
) -> None:
    """Penalise previous tokens in place (see `ops.sampling`)."""
    vocab_size = logits.shape[1]
    block = _block(vocab_size)
    _penalize_kernel[(len(rows), triton.cdiv(vocab_size, block))](
        logits,
        rows,
        counted,
        counts,
        in_prompt,
        frequency,
        presence,
        repetition,
        logits.stride(0),
        VOCAB=vocab_size,
        BLOCK=block,
        num_warps=8,
    )


def apply_bitmask(logits: Tensor, rows: Tensor, bitmask: Tensor) -> None:
    """Set the logits of tokens that the masks forbid to -inf, in place (see `Masks`)."""
    vocab_size = logits.shape[1]
    block = _block(vocab_size)
    _bitmask_kernel[(len(rows), triton.cdiv(vocab_size, block))](
        logits, rows, bitmask, logits.stride(0), bitmask.stride(0), VOCAB=vocab_size, BLOCK=block, num_warps=8
    )


def score(logits: Tensor, temperature: Tensor, chosen_ids: Tensor, num_top: int, requested_ids: Tensor) -> Scores:
    """Return the log-softmax at some tokens (see `ops.sampling`). `native` ranks the best tokens."""
    num_rows, vocab_size = logits.shape
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    _, top_ids = best(logits, min(num_top, vocab_size))
    ids = torch.cat((chosen_ids[:, None], top_ids, requested_ids), dim=1)  # [R, n]
    found = torch.empty(ids.shape, dtype=torch.float32, device=logits.device)
    _score_kernel[(num_rows,)](
        logits,
        temperature,
        ids,
        found,
        logits.stride(0),
        ids.shape[1],
        IDS_BLOCK=triton.next_power_of_2(ids.shape[1]),
        VOCAB=vocab_size,
        UNIT=2.0 ** fraction_bits(vocab_size),
        BLOCK=_block(vocab_size),
        num_warps=8,
    )
    chosen, top, requested = found.split((1, top_ids.shape[1], requested_ids.shape[1]), dim=1)
    return Scores(chosen[:, 0], top, top_ids, requested)


def _block(vocab_size: int) -> int:
    return min(BLOCK, triton.next_power_of_2(vocab_size))


@triton.jit
def _choose_kernel(
    logits,  # [R, VOCAB]
    greedy,  # [R] each
    temperature,
    top_k,
    top_p,
    min_p,
    uniform,
    ids,  # [R]
    sound,  # [R]
    stride,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,  # fixed-point scale of the weights: 1.0 becomes this integer
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * stride
    peak, best_id, num_nan = _peak(line, VOCAB, BLOCK)
    is_sound = (num_nan == 0) & (tl.abs(peak) < float("inf"))
    tl.store(sound + row, is_sound)
    if (tl.load(greedy + row) != 0) | (is_sound == 0):
        tl.store(ids + row, tl.where(is_sound, best_id, 0))
        return

    row_temperature, floor = tl.load(temperature + row), tl.load(min_p + row)
    limit_k, limit_p = tl.load(top_k + row), tl.load(top_p + row)
    last, last_id = (
        tl.cast(-(2**31), tl.int64),
        tl.cast(VOCAB, tl.int32),
    )  # the last kept token; initially the last of all
    is_ranked = (limit_k < VOCAB) | (limit_p < 1.0)
    if limit_k < VOCAB:
        last, last_id = _shortest_prefix(line, limit_k.to(tl.int64), peak, row_temperature, False, VOCAB, UNIT, BLOCK)
    if limit_p < 1.0:
        mass = _mass_of_prefix(line, last, last_id, peak, row_temperature, 0.0, VOCAB, UNIT, BLOCK)
        part = limit_p.to(tl.float64) * mass.to(tl.float64)
        whole = part.to(tl.int64)
        whole += (whole.to(tl.float64) < part).to(tl.int64)  # rounded up
        last, last_id = _shortest_prefix(
            line, tl.maximum(whole, 1), peak, row_temperature, True, VOCAB, UNIT, BLOCK
        )  # fmt: skip
    mass = _mass_of_prefix(line, last, last_id, peak, row_temperature, floor, VOCAB, UNIT, BLOCK)
    target = ((tl.load(uniform + row).to(tl.float64) + MIDDLE) * mass.to(tl.float64)).to(tl.int64)
    target = tl.minimum(target, mass - 1)  # the product may have been rounded up
    if is_ranked:
        _, drawn = _shortest_prefix(line, target + 1, peak, row_temperature, True, VOCAB, UNIT, BLOCK)
        tl.store(ids + row, drawn)
    else:
        tl.store(ids + row, _first_above(line, target, peak, row_temperature, floor, VOCAB, UNIT, BLOCK))


@triton.jit
def _peak(line, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest logit, its lowest id, and the number of NaN logits."""
    offsets = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    where, num_nan = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for base in range(0, VOCAB, BLOCK):
        x = tl.load(line + base + offsets, mask=base + offsets < VOCAB, other=float("-inf"))
        num_nan += (x != x).to(tl.int32)
        is_higher = x > top
        top, where = tl.where(is_higher, x, top), tl.where(is_higher, base + offsets, where)
    peak = tl.max(top, axis=0)
    return peak, tl.min(tl.where(top == peak, where, VOCAB), axis=0), tl.sum(num_nan, axis=0)


@triton.jit
def _ordered(x):
    """Return the bits of floats as integers with the same order."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)  # -0.0 becomes 0.0
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _weight(x, peak, temperature):
    """Return exp((x - peak) / temperature). The best token has exactly 1."""
    return tl.exp(tl.div_rn(x - peak, temperature))


@triton.jit
def _shortest_prefix(
    line,
    limit,  # at least 1, at most the total of all tokens
    peak,
    temperature,
    BY_MASS: tl.constexpr,  # whether `limit` is a mass, not a number of tokens
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the ordered bits and the id of the last token of the shortest ranked prefix that reaches `limit`."""
    low, high = tl.cast(-(2**31), tl.int64), _ordered(peak).to(tl.int64) + 1
    above = tl.cast(0, tl.int64)  # count or mass of the tokens whose bits are at least `high`
    while high - low > 1:
        middle = (low + high) >> 1
        reached = _measure(line, middle, peak, temperature, BY_MASS, VOCAB, UNIT, BLOCK)
        if reached >= limit:
            low = middle
        else:
            high = middle
            above = reached
    rank = limit - above  # number or mass to take from the tokens whose bits are `low`
    if BY_MASS:
        each = (_weight(_float_of(low), peak, temperature) * UNIT).to(tl.int64)
        rank = (rank + each - 1) // each
    return low, _id_of_equal(line, low, rank, VOCAB, BLOCK)


@triton.jit
def _float_of(ordered):
    """Return the inverse of `_ordered`."""
    bits = ordered.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _measure(
    line,
    least,
    peak,
    temperature,
    BY_MASS: tl.constexpr,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the count or the mass of the tokens whose ordered bits are at least `least`."""
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int64)
    for base in range(0, VOCAB, BLOCK):
        x = tl.load(line + base + offsets, mask=base + offsets < VOCAB, other=float("-inf"))
        is_in = (_ordered(x) >= least) & (base + offsets < VOCAB)
        if BY_MASS:
            total += tl.where(is_in, (_weight(x, peak, temperature) * UNIT).to(tl.int64), 0)
        else:
            total += is_in.to(tl.int64)
    return tl.sum(total, axis=0)


@triton.jit
def _mass_of_prefix(
    line,
    last,
    last_id,
    peak,
    temperature,
    floor,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the mass of the ranked tokens up to `last_id` whose weight is at least `floor`."""
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int64)
    for base in range(0, VOCAB, BLOCK):
        x = tl.load(line + base + offsets, mask=base + offsets < VOCAB, other=float("-inf"))
        bits, weight = _ordered(x), _weight(x, peak, temperature)
        is_in = (bits > last) | ((bits == last) & (base + offsets <= last_id))
        total += tl.where(is_in & (weight >= floor), (weight * UNIT).to(tl.int64), 0)
    return tl.sum(total, axis=0)


@triton.jit
def _id_of_equal(line, ordered, rank, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Return the id of the token number `rank` (from 1) among the tokens with these ordered bits."""
    offsets = tl.arange(0, BLOCK)
    before, token_id = tl.cast(0, tl.int64), tl.cast(VOCAB - 1, tl.int32)
    for base in range(0, VOCAB, BLOCK):
        x = tl.load(line + base + offsets, mask=base + offsets < VOCAB, other=float("-inf"))
        is_equal = ((_ordered(x) == ordered) & (base + offsets < VOCAB)).to(tl.int32)
        count = tl.sum(is_equal, axis=0)
        if (before < rank) & (before + count >= rank):
            is_it = (is_equal == 1) & (before + tl.cumsum(is_equal, axis=0) == rank)
            token_id = tl.min(tl.where(is_it, base + offsets, VOCAB), axis=0)
        before += count
    return token_id


@triton.jit
def _first_above(
    line,
    target,
    peak,
    temperature,
    floor,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the first id at which the cumulative mass of tokens with at least the weight `floor` exceeds `target`."""
    offsets = tl.arange(0, BLOCK)
    before, token_id = tl.cast(0, tl.int64), tl.cast(VOCAB - 1, tl.int32)
    for base in range(0, VOCAB, BLOCK):
        x = tl.load(line + base + offsets, mask=base + offsets < VOCAB, other=float("-inf"))
        weight = _weight(x, peak, temperature)
        fixed = tl.where(weight >= floor, (weight * UNIT).to(tl.int64), 0)
        mass = tl.sum(fixed, axis=0)
        if (before <= target) & (before + mass > target):
            is_above = before + tl.cumsum(fixed, axis=0) > target
            token_id = tl.min(tl.where(is_above, base + offsets, VOCAB), axis=0)
        before += mass
    return token_id


@triton.jit
def _penalize_kernel(
    logits,  # [R, VOCAB]
    rows,  # [Q] each
    counted,
    counts,  # [C, VOCAB]
    in_prompt,  # [C, VOCAB]
    frequency,
    presence,
    repetition,
    stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < VOCAB
    logit = logits + tl.load(rows + entry) * stride + ids
    seen = tl.load(counted + entry) * VOCAB + ids
    count = tl.load(counts + seen, mask=inside, other=0)
    prompted = tl.load(in_prompt + seen, mask=inside, other=0)
    x = tl.load(logit, mask=inside, other=0.0)
    x -= tl.load(frequency + entry) * count.to(tl.float32)
    x -= tl.where(count > 0, tl.load(presence + entry), 0.0)
    factor = tl.load(repetition + entry)
    repeated = tl.where(x > 0, tl.div_rn(x, tl.zeros([BLOCK], tl.float32) + factor), x * factor)
    tl.store(logit, tl.where((count > 0) | (prompted != 0), repeated, x), mask=inside)


@triton.jit
def _bitmask_kernel(
    logits,  # [R, VOCAB]
    rows,  # [Q]
    bitmask,  # [Q, words]
    stride,
    mask_stride,
    VOCAB: tl.constexpr,
    BLOCK: tl.constexpr,
):
    entry = tl.program_id(0)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < VOCAB
    words = tl.load(bitmask + entry * mask_stride + ids // 32, mask=inside, other=0)
    is_forbidden = ((words >> (ids % 32)) & 1) == 0
    tl.store(logits + tl.load(rows + entry) * stride + ids, float("-inf"), mask=inside & is_forbidden)


@triton.jit(do_not_specialize=["num_ids"])  # number of ids varies with requests
def _score_kernel(
    logits,  # [R, VOCAB]
    temperature,  # [R]
    ids,  # [R, num_ids]
    found,  # [R, num_ids]
    stride,
    num_ids,
    IDS_BLOCK: tl.constexpr,
    VOCAB: tl.constexpr,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    line, row_temperature = logits + row.to(tl.int64) * stride, tl.load(temperature + row)
    peak, _, _ = _peak(line, VOCAB, BLOCK)
    mass = _measure(line, -(2**31), peak, row_temperature, True, VOCAB, UNIT, BLOCK)
    log_mass = tl.log(mass.to(tl.float64) / UNIT)
    columns = tl.arange(0, IDS_BLOCK)
    inside = columns < num_ids
    wanted = tl.load(ids + row * num_ids + columns, mask=inside, other=0)
    x = tl.load(line + wanted, mask=inside, other=0.0)
    shifted = (x.to(tl.float64) - peak.to(tl.float64)) / row_temperature.to(tl.float64)
    tl.store(found + row * num_ids + columns, (shifted - log_mass).to(tl.float32), mask=inside)
