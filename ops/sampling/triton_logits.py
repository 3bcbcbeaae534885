"""Triton kernels for penalties, masks and log-probabilities. `with_triton` has the kernels that choose tokens."""

# Pyright cannot check the arguments of kernel launches or the types of reductions.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.sampling import Scores
from ops.sampling.native import best, fraction_bits

BLOCK = 4096  # logits per iteration of a program
MIN_IDS = 32  # smallest number of ids per row for which the kernel is compiled: enough for the chosen and 20 best ids


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
    """Penalise generated and prompt tokens in place (see `ops.sampling`)."""
    vocab_size = logits.shape[1]
    block = block_size(vocab_size)
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
    """Set the logits of forbidden tokens to -inf, in place. `rows` and `bitmask` are the fields of `Masks`."""
    vocab_size = logits.shape[1]
    block = block_size(vocab_size)
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
        IDS_BLOCK=max(MIN_IDS, triton.next_power_of_2(ids.shape[1])),
        VOCAB=vocab_size,
        UNIT=2.0 ** fraction_bits(vocab_size),
        BLOCK=block_size(vocab_size),
        num_warps=8,
    )
    chosen, top, requested = found.split((1, top_ids.shape[1], requested_ids.shape[1]), dim=1)
    return Scores(chosen[:, 0], top, top_ids, requested)


def block_size(vocab_size: int) -> int:
    return min(BLOCK, triton.next_power_of_2(vocab_size))


@triton.jit
def weight_of(x, peak, temperature):
    """Return the weight exp((x - peak) / temperature). The best token has exactly 1."""
    return tl.exp(tl.div_rn(x - peak, temperature))


@triton.jit
def _mass(line, temperature, VOCAB: tl.constexpr, UNIT: tl.constexpr, BLOCK: tl.constexpr):
    """Return a row's largest logit, and the mass of all its tokens in fixed point. `line` points to the logits."""
    offsets = tl.arange(0, BLOCK)
    top = tl.full([BLOCK], float("-inf"), tl.float32)
    for base in range(0, VOCAB, BLOCK):
        top = tl.maximum(top, tl.load(line + base + offsets, mask=base + offsets < VOCAB, other=float("-inf")))
    peak = tl.max(top, axis=0)
    total = tl.zeros([BLOCK], tl.int64)
    for base in range(0, VOCAB, BLOCK):
        x = tl.load(line + base + offsets, mask=base + offsets < VOCAB, other=float("-inf"))
        total += (weight_of(x, peak, temperature) * UNIT).to(tl.int64)
    return peak, tl.sum(total, axis=0)


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


# `num_ids` varies between requests. Triton would compile further variants for the value 1 and multiples of 16.
@triton.jit(do_not_specialize=["num_ids"])
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
    peak, mass = _mass(line, row_temperature, VOCAB, UNIT, BLOCK)
    log_mass = tl.log(mass.to(tl.float64) / UNIT)
    columns = tl.arange(0, IDS_BLOCK)
    inside = columns < num_ids
    wanted = tl.load(ids + row * num_ids + columns, mask=inside, other=0)
    x = tl.load(line + wanted, mask=inside, other=0.0)
    shifted = (x.to(tl.float64) - peak.to(tl.float64)) / row_temperature.to(tl.float64)
    tl.store(found + row * num_ids + columns, (shifted - log_mass).to(tl.float32), mask=inside)
