"""Sorts (token, expert) pairs by expert, in Triton.

One launch sorts up to `PART` pairs: each program reads all pairs, and lists those of one expert. This would be slow for
more pairs, so two launches then sort by counting. The first launch counts the pairs of each expert in each part of
`PART` pairs. The second launch sorts each part, and writes each expert's pairs after its pairs of earlier parts.
"""

# Pyright cannot check the arguments of kernel launches.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PART = 1024  # pairs per part
COUNTS_BLOCK = 8192  # counts that a program adds up in one iteration


class Sorted(NamedTuple):
    """Pairs of a token and one of its k experts, sorted by expert and then by pair number.

    Pair t * k + j belongs to token t. Pairs with the expert -1 come first.
    """

    order: Tensor  # int32 [T * k], number of the pair at each position
    starts: Tensor  # int32 [X + 1], first position of each expert, then T * k


def sort_pairs(experts: Tensor, num_experts: int) -> Sorted:
    """Sort the (token, expert) pairs of `experts` (int32 [T, k], contiguous)."""
    num_pairs = experts.numel()
    order = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=experts.device)
    if num_pairs <= PART:
        _list_kernel[(num_experts + 1,)](experts, order, starts, num_pairs, BLOCK=PART)
        return Sorted(order, starts)
    num_parts, bins = triton.cdiv(num_pairs, PART), triton.next_power_of_2(num_experts + 1)
    counts = torch.empty((num_parts, bins), dtype=torch.int32, device=experts.device)
    _count_kernel[(num_parts,)](experts, counts, num_pairs, BINS=bins, BLOCK=PART)
    _place_kernel[(num_parts,)](
        experts,
        counts,
        order,
        starts,
        num_pairs,
        EXPERTS=num_experts,
        BINS=bins,
        BLOCK=PART,
        PARTS_BLOCK=max(1, COUNTS_BLOCK // bins),
        num_warps=8,
    )
    return Sorted(order, starts)


# `num_pairs` varies between steps. Triton would compile further variants for the value 1 and multiples of 16.
@triton.jit(do_not_specialize=["num_pairs"])
def _list_kernel(
    experts,  # [num_pairs]
    order,  # [num_pairs]
    starts,  # [X + 1]
    num_pairs,
    BLOCK: tl.constexpr,
):
    """Count the pairs of all experts with lower numbers than this program's expert. List its pairs after them."""
    expert, lanes = tl.program_id(0), tl.arange(0, BLOCK)
    inside = lanes < num_pairs
    chosen = tl.load(experts + lanes, mask=inside, other=2**30)
    position = tl.sum((chosen < expert).to(tl.int32), axis=0)
    tl.store(starts + expert, position)
    # The last program has no expert. It lists the pairs with expert -1, which other ranks compute.
    expert = tl.where(expert == tl.num_programs(0) - 1, -1, expert)
    position = tl.where(expert < 0, 0, position)
    is_expert = (chosen == expert).to(tl.int32)
    rank = tl.cumsum(is_expert, axis=0) - 1
    tl.store(order + position + rank, lanes, mask=is_expert == 1)


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    experts,  # [num_pairs]
    counts,  # [parts, BINS]
    num_pairs,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count one part's pairs of each expert. Bin 0 counts the pairs with expert -1."""
    part = tl.program_id(0)
    pairs = part * BLOCK + tl.arange(0, BLOCK)
    inside = pairs < num_pairs
    bins = tl.load(experts + pairs, mask=inside, other=0) + 1
    tl.store(counts + part * BINS + tl.arange(0, BINS), tl.histogram(bins, BINS, mask=inside))


@triton.jit(do_not_specialize=["num_pairs"])
def _place_kernel(
    experts,  # [num_pairs]
    counts,  # [parts, BINS]
    order,  # [num_pairs]
    starts,  # [EXPERTS + 1]
    num_pairs,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
):
    """Sort one part, and write the pairs of each expert after the expert's pairs of earlier parts."""
    part, num_parts = tl.program_id(0), tl.num_programs(0)
    bins, lanes, some = tl.arange(0, BINS), tl.arange(0, BLOCK), tl.arange(0, PARTS_BLOCK)
    total, before = tl.zeros([BINS], tl.int32), tl.zeros([BINS], tl.int32)
    for base in range(0, num_parts, PARTS_BLOCK):
        parts = base + some
        tile = tl.load(
            counts + parts[:, None] * BINS + bins[None, :], mask=(parts < num_parts)[:, None], other=0
        )  # [PARTS_BLOCK, BINS]
        total += tl.sum(tile, axis=0)
        before += tl.sum(tl.where((parts < part)[:, None], tile, 0), axis=0)
    firsts = tl.cumsum(total, axis=0) - total
    if part == 0:
        # Bin e + 1 belongs to expert e. The last entry of `starts` is stored separately, because it may have no bin.
        tl.store(starts + bins - 1, firsts, mask=(bins >= 1) & (bins <= EXPERTS))
        tl.store(starts + EXPERTS, num_pairs)
    own = tl.load(counts + part * BINS + bins)
    # A pair's position in `order` = its expert's shift + its position in the sorted part.
    shifts = firsts + before - (tl.cumsum(own, axis=0) - own)

    inside = part * BLOCK + lanes < num_pairs
    chosen = tl.load(experts + part * BLOCK + lanes, mask=inside, other=0) + 1
    keys = tl.sort(tl.where(inside, chosen, BINS) * BLOCK + lanes)  # lanes outside come last
    chosen, lanes_of_keys = keys // BLOCK, keys % BLOCK
    inside = chosen < BINS
    positions = tl.gather(shifts, tl.where(inside, chosen, 0), axis=0) + lanes
    tl.store(order + positions, part * BLOCK + lanes_of_keys, mask=inside)
