"""Paged attention in Triton: split decode for single tokens, ragged prefill for longer rows.

Both kernels iterate over the keys of a row in tiles, with a running softmax (FlashAttention, arXiv 2205.14135). A tile
of queries has all heads that share a kv head. The keys of single-token rows are split, and another kernel merges the
splits (Flash-Decoding, pytorch.org/blog/flash-decoding). A row's splits depend only on the row, so its result does not
depend on the batch. Wide heads, such as the latent vectors of MLA (576 = 512 + 64), are computed in two parts, each a
power of two. If keys and values are in the same memory, each tile of it is loaded once. The host computes grids from
shapes only, and kernels read all other values on the device, so that a CUDA graph can capture the launches.
"""

# Pyright cannot check the arguments of kernel launches.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.attention import Attend, AttentionMetadata, AttentionOptions

# Minimum number of keys per split. Rows of at most 4 * MIN_SPLIT_TOKENS keys use half of this minimum.
MIN_SPLIT_TOKENS = 256
SPLIT_PROGRAMS = 256  # number of programs of a step with one long row, about two per multiprocessor
MAX_SPLITS, MAX_SPLIT_BYTES = 64, 5 * 2**19  # maximum number of splits of a row, and bytes of its partial results
# A decode step launches up to about STEP_PROGRAMS programs, so that long rows do not wait for short rows. If there are
# many rows, it launches up to MIN_PARTS programs per row and tile of heads.
STEP_PROGRAMS, MIN_PARTS = 2048, 4
WIDE_ROWS = 32  # query rows of a tile with heads of more than 256 dimensions
# Stages of the software pipeline: loads of page numbers, of keys and of values are stages too. With fewer stages,
# kernels for sm_80 and sm_90 have a single buffer for keys, and loads wait for products.
DECODE_STAGES = PREFILL_STAGES = 5
FLOAT8_REGISTERS = 168  # per thread of decode with a float8 cache, so that three blocks fit on a multiprocessor
LOG2_E = tl.constexpr(1.4426950408889634)
# Initial value of the running maximum. With -inf, a tile without visible keys would produce NaN.
LOWEST = tl.constexpr(-1.0e30)


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    *,
    num_kv_splits: int | None = None,
    split_tile_tokens: int | None = None,
) -> Tensor:
    """Compute attention of every row over its pages (see `ops.attention`).

    The keys of a single-token row are split into at most `num_kv_splits` equal parts. The default is the number with
    which one long row uses the whole GPU. If `split_tile_tokens` is given, each part has this number of keys instead.
    """
    if q.stride(-1) != 1:
        q = q.contiguous()
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    shared: dict[str, Any] = {
        "scale": options.scale * options.k_scale,
        "v_scale": options.v_scale,
        "WINDOW": options.window,
        "CHUNKED": options.chunked,
        "SOFT_CAP": options.soft_cap,
        "HAS_SINKS": options.sinks is not None,
        "HAS_SLOPES": options.slopes is not None,
        "GROUP": q.shape[1] // k_pool.shape[1],
        "DIM": q.shape[2],
        **_dim_blocks(q.shape[2]),
        "VALUES_IN_KEYS": k_pool.data_ptr() == v_pool.data_ptr(),
        "PAGE": metadata.page_size,
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }
    sinks = out if options.sinks is None else options.sinks  # without sinks, a valid pointer that is not read
    slopes = out if options.slopes is None else options.slopes
    if any(count == 1 for count in metadata.counts_host):
        longest = metadata.page_table.shape[1] * metadata.page_size
        if split_tile_tokens is not None:
            num_kv_splits = triton.cdiv(longest, split_tile_tokens)
        elif num_kv_splits is None:
            num_kv_splits = _num_splits(k_pool.shape[1] * _heads_blocks(shared)[1], q[0].numel() * 4)
        splits = {"SPLITS": num_kv_splits, "SPLIT_TILE": split_tile_tokens}
        _decode(q, k_pool, v_pool, sinks, slopes, out, metadata, splits, shared)
    if any(count > 1 for count in metadata.counts_host):
        _prefill(q, k_pool, v_pool, sinks, slopes, out, metadata, shared)
    return out


def make_attend(num_kv_splits: int | None = None, split_tile_tokens: int | None = None) -> Attend:
    """Return `attend` with these settings."""
    return partial(attend, num_kv_splits=num_kv_splits, split_tile_tokens=split_tile_tokens)


def _dim_blocks(dim: int) -> dict[str, int]:
    """Return the sizes of the two parts of a head. The second one is 0 for heads of up to 256 dimensions."""
    if dim <= 256:
        return {"DIM_BLOCK": max(16, triton.next_power_of_2(dim)), "REST_BLOCK": 0}
    first = 1 << (dim.bit_length() - 1)
    return {"DIM_BLOCK": first, "REST_BLOCK": max(16, triton.next_power_of_2(dim - first)) if dim > first else 0}


def _decode(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    sinks: Tensor,
    slopes: Tensor,
    out: Tensor,
    metadata: AttentionMetadata,
    splits: dict[str, Any],
    shared: dict[str, Any],
) -> None:
    (_, num_heads, dim), num_kv_heads = q.shape, k_pool.shape[1]
    num_rows, num_splits = len(metadata.counts_host), splits["SPLITS"]
    heads_block, num_blocks = _heads_blocks(shared)
    num_parts = max(MIN_PARTS, triton.cdiv(STEP_PROGRAMS, num_rows * num_kv_heads * num_blocks))
    parts = torch.empty(num_rows, num_heads, num_splits, dim, dtype=torch.float32, device=q.device)
    masses = torch.empty(num_rows, num_heads, num_splits, dtype=torch.float32, device=q.device)
    rows = (metadata.page_table, metadata.starts, metadata.query_starts)
    _decode_kernel[(num_rows, num_kv_heads * num_blocks, min(num_splits, num_parts))](
        q,
        k_pool,
        v_pool,
        *rows,
        slopes,
        parts,
        masses,
        metadata.page_table.stride(0),
        q.stride(0),
        q.stride(1),
        KV_HEADS=num_kv_heads,
        HEADS_BLOCK=heads_block,
        KEYS_BLOCK=_keys_block(q, shared),
        MIN_SPLIT=MIN_SPLIT_TOKENS,
        **splits,
        **{name: value for name, value in shared.items() if name not in ("v_scale", "HAS_SINKS")},
        num_warps=8 if shared["DIM_BLOCK"] > 256 else 4,
        num_stages=DECODE_STAGES,
        maxnreg=FLOAT8_REGISTERS if k_pool.dtype.itemsize == 1 and shared["DIM_BLOCK"] <= 128 else None,
    )
    _merge_kernel[(num_rows, num_heads)](
        parts,
        masses,
        metadata.starts,
        metadata.query_starts,
        sinks,
        out,
        shared["v_scale"],
        WINDOW=shared["WINDOW"],
        CHUNKED=shared["CHUNKED"],
        MIN_SPLIT=MIN_SPLIT_TOKENS,
        **splits,
        HAS_SINKS=shared["HAS_SINKS"],
        DIM=dim,
        DIM_BLOCK=triton.next_power_of_2(dim),
        num_warps=1,
    )


def _heads_blocks(shared: dict[str, Any]) -> tuple[int, int]:
    """Return the number of query heads in a decode tile, and the number of tiles per kv head."""
    most = WIDE_ROWS if shared["DIM_BLOCK"] > 256 else 64
    heads_block = min(most, max(16, triton.next_power_of_2(shared["GROUP"])))
    return heads_block, triton.cdiv(shared["GROUP"], heads_block)


def _num_splits(num_tiles: int, split_bytes: int) -> int:
    """Return the maximum number of splits of a row, a power of two that depends only on the model.

    `num_tiles` is the number of tiles of heads. `split_bytes` is the size of one split's partial result.
    """
    most = max(1, min(MAX_SPLITS, MAX_SPLIT_BYTES // split_bytes, triton.cdiv(SPLIT_PROGRAMS, num_tiles)))
    return 1 << (most.bit_length() - 1)


def _prefill(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    sinks: Tensor,
    slopes: Tensor,
    out: Tensor,
    metadata: AttentionMetadata,
    shared: dict[str, Any],
) -> None:
    num_rows, num_kv_heads, group = len(metadata.counts_host), k_pool.shape[1], shared["GROUP"]
    rows_block = _queries_block(q, shared)
    _prefill_kernel[(q.shape[0] * group // rows_block + num_rows, num_kv_heads)](
        q,
        k_pool,
        v_pool,
        metadata.page_table,
        metadata.starts,
        metadata.query_starts,
        sinks,
        slopes,
        out,
        num_rows,
        metadata.page_table.stride(0),
        q.stride(0),
        q.stride(1),
        KV_HEADS=num_kv_heads,
        ROWS_BLOCK=rows_block,
        KEYS_BLOCK=_keys_block(q, shared),
        **shared,
        num_warps=8,
        num_stages=PREFILL_STAGES,
    )


def _queries_block(q: Tensor, shared: dict[str, Any]) -> int:
    """Return the number of rows of a query tile whose queries and sums fit in a program's registers."""
    if q.dtype.itemsize == 4:
        return 16
    if shared["DIM_BLOCK"] > 256:
        return WIDE_ROWS
    return 128 if shared["DIM_BLOCK"] <= 128 else 64


def _keys_block(q: Tensor, shared: dict[str, Any]) -> int:
    """Return the number of keys per tile: fewer for float32 and for wide heads."""
    if q.dtype.itemsize == 4:
        return 16
    return 64 if shared["DIM_BLOCK"] <= 128 else 32


# `table_stride` varies between steps. Triton would compile further variants for the value 1 and multiples of 16.
@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    q,  # [T, H, DIM]
    k_pool,  # [P, KV_HEADS, PAGE, DIM]
    v_pool,
    page_table,  # [B, W]
    starts,  # [B]
    query_starts,  # [B + 1]
    slopes,  # [H]
    parts,  # [B, H, SPLITS, DIM], attention result of each split
    masses,  # [B, H, SPLITS], log2 of each split's softmax denominator
    table_stride,
    q_token_stride,
    q_head_stride,
    scale,
    WINDOW: tl.constexpr,  # None: no window
    CHUNKED: tl.constexpr,  # whether positions are divided into chunks of WINDOW
    SOFT_CAP: tl.constexpr,  # None: no soft cap
    HAS_SLOPES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KEYS_BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TILE: tl.constexpr,  # keys per split; None: SPLITS equal splits
    MIN_SPLIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0)
    token = tl.load(query_starts + row)
    if tl.load(query_starts + row + 1) - token != 1:
        return
    blocks: tl.constexpr = (GROUP + HEADS_BLOCK - 1) // HEADS_BLOCK
    kv_head = tl.program_id(1) // blocks
    in_group = tl.program_id(1) % blocks * HEADS_BLOCK + tl.arange(0, HEADS_BLOCK)  # [heads]
    heads, dims = kv_head * GROUP + in_group, tl.arange(0, DIM_BLOCK)
    inside = (in_group[:, None] < GROUP) & (dims[None, :] < DIM)
    rest_dims = DIM_BLOCK + tl.arange(0, REST_BLOCK if REST_BLOCK else 1)
    rest_inside = (in_group[:, None] < GROUP) & (rest_dims[None, :] < DIM)

    position = tl.load(starts + row)
    low, size, first, last = _splits_of(position, WINDOW, CHUNKED, SPLITS, SPLIT_TILE, MIN_SPLIT)
    offsets = token.to(tl.int64) * q_token_stride + heads * q_head_stride
    queries = tl.load(q + offsets[:, None] + dims[None, :], mask=inside, other=0.0)
    rest_queries = (
        tl.load(q + offsets[:, None] + rest_dims[None, :], mask=rest_inside, other=0.0) if REST_BLOCK else None
    )
    if k_pool.dtype.element_ty.primitive_bitwidth == 8 and queries.dtype != tl.float32:
        queries, rest_queries, scale = _in_float16(queries, rest_queries, scale, REST_BLOCK)
    positions = tl.zeros([HEADS_BLOCK], tl.int32) + position
    pages = page_table + row.to(tl.int64) * table_stride
    slope = tl.load(slopes + heads, mask=in_group < GROUP, other=0.0) if HAS_SLOPES else None
    # The result of each split is stored separately, so results are bit-identical for any number of programs.
    for split in range(first + tl.program_id(2), last, tl.num_programs(2)):
        begin = tl.maximum(low, split * size) if SPLIT_TILE is not None else low + split * size
        end = tl.minimum(position + 1, (split + 1) * size if SPLIT_TILE is not None else begin + size)
        peak = tl.full([HEADS_BLOCK], LOWEST, tl.float32)
        total = tl.zeros([HEADS_BLOCK], tl.float32)
        summed = tl.zeros([HEADS_BLOCK, DIM_BLOCK], tl.float32)
        rest_summed = tl.zeros([HEADS_BLOCK, REST_BLOCK], tl.float32) if REST_BLOCK else None
        peak, total, summed, rest_summed = _over_keys(
            queries, rest_queries, positions, begin, end, peak, total, summed, rest_summed, k_pool, v_pool, pages,
            kv_head, scale, slope, WINDOW, CHUNKED, SOFT_CAP, KV_HEADS, DIM, DIM_BLOCK, REST_BLOCK, VALUES_IN_KEYS,
            PAGE, KEYS_BLOCK, PRECISION,
        )  # fmt: skip
        offset = (row.to(tl.int64) * KV_HEADS * GROUP + heads) * SPLITS + split  # [heads]
        tl.store(parts + offset[:, None] * DIM + dims[None, :], summed / total[:, None], mask=inside)
        if REST_BLOCK:
            tl.store(parts + offset[:, None] * DIM + rest_dims[None, :], rest_summed / total[:, None], mask=rest_inside)
        tl.store(masses + offset, peak + tl.log2(total), mask=in_group < GROUP)


@triton.jit
def _in_float16(queries, rest_queries, scale, REST_BLOCK: tl.constexpr):
    """Return queries in float16, each divided by a power of two, and the scales [heads, 1] of their scores.

    Float8 keys and values convert to float16 in a quarter of the instructions that a conversion to bfloat16 takes.
    """
    peak = tl.max(tl.abs(queries.to(tl.float32)), axis=1)
    if REST_BLOCK:
        peak = tl.maximum(peak, tl.max(tl.abs(rest_queries.to(tl.float32)), axis=1))
    exponent = tl.cast(peak, tl.int32, bitcast=True) & 0x7F800000  # as a float: the largest power of two up to the peak
    inverse = (0x7F000000 - exponent).to(tl.float32, bitcast=True)[:, None]
    queries = (queries.to(tl.float32) * inverse).to(tl.float16)
    if REST_BLOCK:
        rest_queries = (rest_queries.to(tl.float32) * inverse).to(tl.float16)
    return queries, rest_queries, scale * exponent.to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _splits_of(
    position,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
):
    """Return (first visible key, keys per split, first split, end of the splits) of a token at this position."""
    low, high = 0, position + 1
    if WINDOW is not None:
        low = position // WINDOW * WINDOW if CHUNKED else tl.maximum(high - WINDOW, 0)
    if SPLIT_TILE is not None:
        return low, SPLIT_TILE, low // SPLIT_TILE, tl.cdiv(high, SPLIT_TILE)
    least = tl.where(high - low <= 4 * MIN_SPLIT, MIN_SPLIT // 2, MIN_SPLIT)
    size = tl.maximum(tl.cdiv(high - low, SPLITS), least)
    return low, size, 0, tl.cdiv(high - low, size)


@triton.jit
def _merge_kernel(
    parts,  # [B, H, SPLITS, DIM]
    masses,  # [B, H, SPLITS]
    starts,  # [B]
    query_starts,  # [B + 1]
    sinks,  # [H]
    out,  # [T, H, DIM]
    v_scale,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_TILE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    token = tl.load(query_starts + row)
    if tl.load(query_starts + row + 1) - token != 1:
        return
    dims = tl.arange(0, DIM_BLOCK)
    offset = (row.to(tl.int64) * num_heads + head) * SPLITS
    peak, total = tl.full([1], LOWEST, tl.float32), tl.zeros([1], tl.float32)
    if HAS_SINKS:
        peak = tl.zeros([1], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2_E
        total += 1.0
    summed = tl.zeros([DIM_BLOCK], tl.float32)
    _, _, first, last = _splits_of(tl.load(starts + row), WINDOW, CHUNKED, SPLITS, SPLIT_TILE, MIN_SPLIT)
    for split in range(first, last):
        mass = tl.load(masses + offset + split)
        part = tl.load(parts + (offset + split) * DIM + dims, mask=dims < DIM, other=0.0)
        higher = tl.maximum(peak, mass)
        kept, added = tl.exp2(peak - higher), tl.exp2(mass - higher)
        summed = summed * kept + part * added
        total = total * kept + added
        peak = higher
    index = (token.to(tl.int64) * num_heads + head) * DIM + dims
    tl.store(out + index, (summed / total * v_scale).to(out.dtype.element_ty), mask=dims < DIM)


# These arguments vary between steps. Triton would compile further variants for the value 1 and multiples of 16.
@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def _prefill_kernel(
    q,  # [T, H, DIM]
    k_pool,  # [P, KV_HEADS, PAGE, DIM]
    v_pool,
    page_table,  # [B, W]
    starts,  # [B]
    query_starts,  # [B + 1]
    sinks,  # [H]
    slopes,  # [H]
    out,  # [T, H, DIM]
    num_rows,
    table_stride,
    q_token_stride,
    q_head_stride,
    scale,
    v_scale,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_SLOPES: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS_BLOCK: tl.constexpr,  # pairs of a token and a head in a query tile
    KEYS_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # The first program of row b has the number query_starts[b] * GROUP // ROWS_BLOCK + b. With this formula, row b has
    # at least as many programs as tiles of (token, head) pairs.
    program, kv_head = tl.program_id(0), tl.program_id(1)
    row, end_row = 0, num_rows
    while end_row - row > 1:
        middle = (row + end_row) // 2
        if tl.load(query_starts + middle) * GROUP // ROWS_BLOCK + middle <= program:
            row = middle
        else:
            end_row = middle
    token = tl.load(query_starts + row)
    count = tl.load(query_starts + row + 1) - token
    first = (program - token * GROUP // ROWS_BLOCK - row) * ROWS_BLOCK
    if (count == 1) | (first >= count * GROUP):
        return

    pairs, dims = first + tl.arange(0, ROWS_BLOCK), tl.arange(0, DIM_BLOCK)
    tokens, heads = pairs // GROUP, kv_head * GROUP + pairs % GROUP  # [ROWS_BLOCK]
    is_query = tokens < count
    inside = is_query[:, None] & (dims[None, :] < DIM)
    rest_dims = DIM_BLOCK + tl.arange(0, REST_BLOCK if REST_BLOCK else 1)
    rest_inside = is_query[:, None] & (rest_dims[None, :] < DIM)
    flat = (token + tokens).to(tl.int64)
    offset = flat * q_token_stride + heads * q_head_stride
    queries = tl.load(q + offset[:, None] + dims[None, :], mask=inside, other=0.0)
    rest_queries = (
        tl.load(q + offset[:, None] + rest_dims[None, :], mask=rest_inside, other=0.0) if REST_BLOCK else None
    )

    start = tl.load(starts + row)
    end = start + tl.minimum((first + ROWS_BLOCK - 1) // GROUP + 1, count)
    begin = 0
    if WINDOW is not None:
        earliest = start + first // GROUP
        begin = earliest // WINDOW * WINDOW if CHUNKED else tl.maximum(earliest - WINDOW + 1, 0)
        begin = begin // KEYS_BLOCK * KEYS_BLOCK
    peak = tl.full([ROWS_BLOCK], LOWEST, tl.float32)
    total = tl.zeros([ROWS_BLOCK], tl.float32)
    if HAS_SINKS:
        peak = tl.load(sinks + heads, mask=is_query, other=0.0).to(tl.float32) * LOG2_E
        total += 1.0
    summed = tl.zeros([ROWS_BLOCK, DIM_BLOCK], tl.float32)
    rest_summed = tl.zeros([ROWS_BLOCK, REST_BLOCK], tl.float32) if REST_BLOCK else None
    pages = page_table + tl.cast(row, tl.int64) * table_stride
    slope = tl.load(slopes + heads, mask=is_query, other=0.0) if HAS_SLOPES else None
    peak, total, summed, rest_summed = _over_keys(
        queries, rest_queries, start + tokens, begin, end, peak, total, summed, rest_summed, k_pool, v_pool, pages,
        kv_head, scale, slope, WINDOW, CHUNKED, SOFT_CAP, KV_HEADS, DIM, DIM_BLOCK, REST_BLOCK, VALUES_IN_KEYS,
        PAGE, KEYS_BLOCK, PRECISION,
    )  # fmt: skip
    packed = (flat * (KV_HEADS * GROUP) + heads) * DIM
    result = summed / total[:, None] * v_scale
    tl.store(out + packed[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=inside)
    if REST_BLOCK:
        rest = rest_summed / total[:, None] * v_scale
        tl.store(out + packed[:, None] + rest_dims[None, :], rest.to(out.dtype.element_ty), mask=rest_inside)


@triton.jit
def _over_keys(
    queries,  # [M, DIM_BLOCK]
    rest_queries,  # [M, REST_BLOCK], or None
    positions,  # [M]
    begin,
    end,
    peak,  # [M], the largest score so far, times log2(e)
    total,  # [M], the sum of the weights 2 ** (score * log2(e) - peak)
    summed,  # [M, DIM_BLOCK], the sum of the values times these weights
    rest_summed,  # [M, REST_BLOCK], or None
    k_pool,
    v_pool,
    pages,  # [W], the pages of one row
    kv_head,
    scale,
    slope,  # [M], or None
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS_BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Update each query's running softmax with the keys at positions begin .. end - 1 that it may attend to.

    Returns the new (peak, total, summed, rest_summed).
    """
    dims = tl.arange(0, DIM_BLOCK)
    rest_dims = DIM_BLOCK + tl.arange(0, REST_BLOCK if REST_BLOCK else 1)
    for base in range(begin, end, KEYS_BLOCK):
        keys = base + tl.arange(0, KEYS_BLOCK)  # [N], positions of the keys
        page = tl.load(pages + keys // PAGE, mask=keys < end, other=0).to(tl.int64)
        offset = ((page * KV_HEADS + kv_head) * PAGE + keys % PAGE) * DIM
        inside = (keys < end)[:, None] & (dims < DIM)[None, :]
        k = tl.load(k_pool + offset[:, None] + dims[None, :], mask=inside, other=0.0)  # [N, DIM]
        scores = tl.dot(queries, tl.trans(k.to(queries.dtype)), input_precision=PRECISION)  # [M, N]
        if REST_BLOCK:
            rest_inside = (keys < end)[:, None] & (rest_dims < DIM)[None, :]
            rest_k = tl.load(k_pool + offset[:, None] + rest_dims[None, :], mask=rest_inside, other=0.0)
            scores += tl.dot(rest_queries, tl.trans(rest_k.to(queries.dtype)), input_precision=PRECISION)
        scores *= scale
        if SOFT_CAP is not None:
            # SOFT_CAP * tanh(scores / SOFT_CAP)
            scores = SOFT_CAP * (2.0 * tl.sigmoid(scores * (2.0 / SOFT_CAP)) - 1.0)
        if slope is not None:
            scores += slope[:, None] * (keys[None, :] - positions[:, None]).to(tl.float32)
        is_seen = (keys[None, :] <= positions[:, None]) & (keys < end)[None, :]
        if WINDOW is not None:
            if CHUNKED:
                is_seen &= keys[None, :] >= positions[:, None] // WINDOW * WINDOW
            else:
                is_seen &= keys[None, :] > positions[:, None] - WINDOW
        scores = tl.where(is_seen, scores * LOG2_E, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1))
        weights, kept = tl.exp2(scores - higher[:, None]), tl.exp2(peak - higher)
        v = k
        if not VALUES_IN_KEYS:
            v = tl.load(v_pool + offset[:, None] + dims[None, :], mask=inside, other=0.0)  # [N, DIM_BLOCK]
        added = tl.dot(weights.to(queries.dtype), v.to(queries.dtype), input_precision=PRECISION)
        summed = summed * kept[:, None] + added
        if REST_BLOCK:
            rest_v = rest_k
            if not VALUES_IN_KEYS:
                rest_v = tl.load(v_pool + offset[:, None] + rest_dims[None, :], mask=rest_inside, other=0.0)
            added = tl.dot(weights.to(queries.dtype), rest_v.to(queries.dtype), input_precision=PRECISION)
            rest_summed = rest_summed * kept[:, None] + added
        total = total * kept + tl.sum(weights, axis=1)
        peak = higher
    return peak, total, summed, rest_summed
