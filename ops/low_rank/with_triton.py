"""Low-rank additions in Triton: one kernel computes A x of each token, a second kernel computes y += B (A x).

A program computes a tile of 32 tokens, whose slots may differ: it iterates over the distinct slots of the tile.
Therefore tokens need no sorting, and a program reads A and B once if its tile is of one prompt. If no token has an
adapter, the program ends after it has read the slots. Grids and memory depend only on shapes. If there are few tokens,
several programs share a tile: each computes some of the slots, and some of the inputs. The order in which a token's
products are summed does not depend on the number of tokens.
"""

# Pyright cannot check the arguments of kernel launches.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.low_rank import LowRank

__all__ = ["add_low_rank"]

TOKENS_BLOCK = 32
OUT_BLOCK = 64
MAX_CHUNKS, MIN_CHUNK = 16, 512  # maximum number of chunks of the inputs; minimum number of inputs per chunk
MAX_SPLIT_TOKENS = 512  # maximum number of tokens for which each chunk has its own programs
MAX_LANES = 64  # maximum number of programs that share the slots of all tiles, but at least one program per tile


def add_low_rank(y: Tensor, x: Tensor, weights: LowRank, slots: Tensor) -> Tensor:
    """Add `B (A x)` to y in place, with A and B from each token's slot (see `ops.low_rank`)."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_tokens, (num_slots, parts, rank, size) = len(x), weights.a.shape
    out_size, lines, wide = y.shape[1], parts * rank, x.dtype == torch.float32
    in_block, lines_block = (32, min(32, _block(lines))) if wide else (128, min(64, _block(lines)))
    chunk = triton.cdiv(max(MIN_CHUNK, triton.cdiv(size, MAX_CHUNKS)), in_block) * in_block
    num_chunks = triton.cdiv(size, chunk)
    num_sums = num_chunks if num_tokens <= MAX_SPLIT_TOKENS else 1
    num_tiles = triton.cdiv(num_tokens, TOKENS_BLOCK)
    num_lanes = max(1, min(num_slots, num_tokens, MAX_LANES // max(1, num_tiles)))
    shrunk = torch.empty((num_sums, num_tokens, lines), dtype=torch.float32, device=x.device)
    _shrink_kernel[(num_tiles * triton.cdiv(lines, lines_block), num_lanes, num_sums)](
        x,
        weights.a,
        weights.ranks,
        slots,
        shrunk,
        num_tokens,
        x.stride(0),
        IN=size,
        RANK=rank,
        LINES=lines,
        CHUNK=chunk,
        TOKENS_BLOCK=TOKENS_BLOCK,
        LINES_BLOCK=lines_block,
        IN_BLOCK=in_block,
        PRECISION="ieee" if wide else "tf32",
        num_warps=4,
        num_stages=2 if wide else 4,
    )
    _expand_kernel[(num_tiles * triton.cdiv(out_size, OUT_BLOCK), num_lanes)](
        shrunk,
        weights.b,
        weights.ranks,
        weights.ends,
        slots,
        y,
        num_tokens,
        num_sums,
        y.stride(0),
        OUT=out_size,
        RANK=rank,
        PARTS=parts,
        CHUNKS=num_chunks,
        TOKENS_BLOCK=TOKENS_BLOCK,
        OUT_BLOCK=OUT_BLOCK,
        RANK_BLOCK=min(32 if x.dtype == torch.bfloat16 else 16, _block(rank)),
        num_warps=4,
        num_stages=2,
    )
    return y


def _block(count: int) -> int:
    """Return the smallest block size for `count` lines or columns that `tl.dot` accepts."""
    return max(16, triton.next_power_of_2(count))


# `num_tokens` varies between steps. Triton would compile further variants for the value 1 and multiples of 16.
@triton.jit(do_not_specialize=["num_tokens"])
def _shrink_kernel(
    x,  # [num_tokens, IN]
    a,  # [S, LINES, IN], one line per sub-layer and index below RANK
    ranks,  # [S]
    slots,  # [num_tokens]
    shrunk,  # [sums, num_tokens, LINES], one sum per chunk, or a single sum over all chunks
    num_tokens,
    x_stride,
    IN: tl.constexpr,
    RANK: tl.constexpr,
    LINES: tl.constexpr,
    CHUNK: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr,
    LINES_BLOCK: tl.constexpr,
    IN_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    blocks: tl.constexpr = (LINES + LINES_BLOCK - 1) // LINES_BLOCK
    tokens = tl.program_id(0) // blocks * TOKENS_BLOCK + tl.arange(0, TOKENS_BLOCK)
    lines = tl.program_id(0) % blocks * LINES_BLOCK + tl.arange(0, LINES_BLOCK)
    inner = tl.arange(0, IN_BLOCK)
    first = tl.program_id(2) * CHUNK
    end = first + CHUNK if tl.num_programs(2) > 1 else IN
    rows = x + tokens.to(tl.int64)[:, None] * x_stride + inner[None, :]  # [tokens, IN]
    sums = shrunk + (tl.program_id(2).to(tl.int64) * num_tokens + tokens)[:, None] * LINES + lines[None, :]
    left = _slots_of_lane(slots, tokens, num_tokens)
    slot = tl.max(left, axis=0)
    while slot > 0:
        is_line = (lines < LINES) & (lines % RANK < tl.load(ranks + slot - 1))
        if tl.max(is_line.to(tl.int32), axis=0) > 0:
            is_token = left == slot
            a_rows = a + ((slot - 1).to(tl.int64) * LINES + lines)[:, None] * IN + inner[None, :]  # [lines, IN]
            total = tl.zeros([TOKENS_BLOCK, LINES_BLOCK], tl.float32)
            for start in range(first, end, CHUNK):
                part = tl.zeros([TOKENS_BLOCK, LINES_BLOCK], tl.float32)
                for base in range(start, tl.minimum(start + CHUNK, IN), IN_BLOCK):
                    is_in = (base + inner < IN)[None, :]
                    values = tl.load(rows + base, mask=is_token[:, None] & is_in, other=0.0)
                    factors = tl.load(a_rows + base, mask=is_line[:, None] & is_in, other=0.0)
                    part = tl.dot(values, tl.trans(factors), part, input_precision=PRECISION)
                total += part
            tl.store(sums, total, mask=is_token[:, None] & is_line[None, :])
        left = tl.where(left == slot, 0, left)
        slot = tl.max(left, axis=0)


# These arguments vary between steps. Triton would compile further variants for the value 1 and multiples of 16.
@triton.jit(do_not_specialize=["num_tokens", "num_sums"])
def _expand_kernel(
    shrunk,  # [num_sums, num_tokens, PARTS, RANK]
    b,  # [S, RANK, OUT]
    ranks,  # [S]
    ends,  # [PARTS]
    slots,  # [num_tokens]
    y,  # [num_tokens, OUT]
    num_tokens,
    num_sums,  # CHUNKS or 1
    y_stride,
    OUT: tl.constexpr,
    RANK: tl.constexpr,
    PARTS: tl.constexpr,
    CHUNKS: tl.constexpr,
    TOKENS_BLOCK: tl.constexpr,
    OUT_BLOCK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    blocks: tl.constexpr = (OUT + OUT_BLOCK - 1) // OUT_BLOCK
    tokens = tl.program_id(0) // blocks * TOKENS_BLOCK + tl.arange(0, TOKENS_BLOCK)
    first = tl.program_id(0) % blocks * OUT_BLOCK
    columns, indices = first + tl.arange(0, OUT_BLOCK), tl.arange(0, RANK_BLOCK)
    is_column = columns < OUT
    sums = shrunk + tokens.to(tl.int64)[:, None] * (PARTS * RANK) + indices[None, :]  # [tokens, RANK]
    targets = y + tokens.to(tl.int64)[:, None] * y_stride + columns[None, :]  # [tokens, OUT]
    left = _slots_of_lane(slots, tokens, num_tokens)
    slot = tl.max(left, axis=0)
    while slot > 0:
        rank = tl.load(ranks + slot - 1)
        if rank > 0:
            is_token = left == slot
            b_rows = b + ((slot - 1).to(tl.int64) * RANK + indices)[:, None] * OUT + columns[None, :]  # [RANK, OUT]
            is_inside = is_token[:, None] & is_column[None, :]
            before = tl.load(targets, mask=is_inside, other=0.0)
            total = tl.zeros([TOKENS_BLOCK, OUT_BLOCK], tl.float32)
            begin = tl.zeros([], tl.int64)
            for part in range(PARTS):  # a block of columns may span several sub-layers
                end = tl.load(ends + part)
                if (begin < first + OUT_BLOCK) & (end > first):
                    product = tl.zeros([TOKENS_BLOCK, OUT_BLOCK], tl.float32)
                    for base in range(0, rank, RANK_BLOCK):
                        is_index = base + indices < rank
                        is_sum = is_token[:, None] & is_index[None, :]
                        values = tl.load(sums + part * RANK + base, mask=is_sum, other=0.0)
                        if num_sums > 1:
                            for chunk in tl.static_range(1, CHUNKS):
                                further = sums + part * RANK + base + chunk * num_tokens.to(tl.int64) * (PARTS * RANK)
                                values += tl.load(further, mask=is_sum, other=0.0)
                        factors = tl.load(b_rows + base * OUT, mask=is_index[:, None] & is_column[None, :], other=0.0)
                        product = _add_product(values, factors, product)
                    total = tl.where((columns >= begin)[None, :] & (columns < end)[None, :], product, total)
                begin = end
            tl.store(targets, (before.to(tl.float32) + total).to(y.dtype.element_ty), mask=is_inside)
        left = tl.where(left == slot, 0, left)
        slot = tl.max(left, axis=0)


@triton.jit
def _slots_of_lane(slots, tokens, num_tokens):
    """Return each token's slot, or 0 if the slot is computed by another program of the grid's axis 1."""
    all_slots = tl.load(slots + tokens, mask=tokens < num_tokens, other=0)
    return tl.where(all_slots % tl.num_programs(1) == tl.program_id(1), all_slots, 0)


@triton.jit
def _add_product(values, factors, total):
    """Return total + values @ factors. `values` are float32, and the product uses at least 16 bits of them."""
    if factors.dtype == tl.bfloat16:
        high = values.to(tl.bfloat16)
        total = tl.dot(high, factors, total)
        total = tl.dot((values - high.to(tl.float32)).to(tl.bfloat16), factors, total)
    elif factors.dtype == tl.float16:  # the range of float16 is too small for `values`
        total = tl.dot(values, factors.to(tl.float32), total, input_precision="tf32x3")
    else:
        total = tl.dot(values, factors, total, input_precision="ieee")
    return total
