"""Norms of heads, rotation and cache write in one Triton kernel. A program computes several heads of one token."""

# Pyright cannot check the arguments of kernel launches.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportPossiblyUnboundVariable=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.attention import AttentionMetadata
from ops.rope import Rotation

PAIRS = 1024  # pairs of dimensions per program


def norm_rotate(q: Tensor, k: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
    """Normalise and rotate queries and keys (see `ops.rope`). Returns new tensors."""
    q_out, k_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    _launch(q, k, rotation, q_out, k_out)
    return q_out, k_out


def rotate_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    metadata: AttentionMetadata,
    rotation: Rotation,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """Normalise, rotate, and store keys and values (see `ops.rope`). Returns the queries as a new tensor."""
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _launch(q, k, rotation, q_out, k_pool, v, v_pool, metadata.slot_mapping, k_scale, v_scale)
    return q_out


def _launch(
    q: Tensor,
    k: Tensor,
    rotation: Rotation,
    q_out: Tensor,
    k_out: Tensor,
    v: Tensor | None = None,
    v_out: Tensor | None = None,
    slot_mapping: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write the results to `q_out`, `k_out` and `v_out`. With `slot_mapping`, `k_out` and `v_out` are cache pools."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    v = k if v is None else v if v.stride(-1) == 1 else v.contiguous()
    (num_tokens, num_heads, head_dim), num_kv_heads = q.shape, k.shape[1]
    table, positions, interleaved, norms, _ = rotation
    half = table.shape[1] // 2
    half_block, rest = triton.next_power_of_2(half), head_dim - 2 * half
    heads = min(max(1, PAIRS // half_block), triton.next_power_of_2(max(num_heads, num_kv_heads)))
    stored = slot_mapping is not None
    _norm_rotate_kernel[(num_tokens, triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads))](
        q,
        k,
        v,
        q_out,
        k_out,
        v_out,
        None if norms is None else norms.q,
        None if norms is None else norms.k,
        table,
        positions,
        slot_mapping,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        0.0 if norms is None else norms.eps,
        1.0 / k_scale,
        1.0 / v_scale,
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        DIM=head_dim,
        HALF=half,
        PAGE=k_out.shape[2] if stored else 0,
        HEADS_BLOCK=heads,
        HALF_BLOCK=half_block,
        REST_BLOCK=triton.next_power_of_2(rest) if rest else 0,
        DIM_BLOCK=triton.next_power_of_2(head_dim),
        INTERLEAVED=interleaved,
        UNIT_OFFSET=norms is not None and norms.unit_offset,
        LARGEST=torch.finfo(k_out.dtype).max if k_out.dtype.itemsize == 1 else None,
        num_warps=4,
    )


@triton.jit
def _norm_rotate_kernel(
    q,  # [T, HEADS, DIM]
    k,  # [T, KV_HEADS, DIM]
    v,  # [T, KV_HEADS, DIM]
    q_out,  # [T, HEADS, DIM]
    k_out,  # [P, KV_HEADS, PAGE, DIM], or [T, KV_HEADS, DIM] if PAGE is 0
    v_out,  # [P, KV_HEADS, PAGE, DIM]; None if PAGE is 0
    q_weight,  # [DIM]; None without norms
    k_weight,
    table,  # [N, 2 * HALF], cosines then sines
    positions,  # [T]; None: row t of the table belongs to token t
    slot_mapping,  # [T]; None if PAGE is 0
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    eps,
    k_factor,
    v_factor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,  # 0 if all dimensions are rotated
    DIM_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    LARGEST: tl.constexpr,  # largest value of a float8 pool, to which k and v are clamped; None: other dtypes
):
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    query_blocks: tl.constexpr = (HEADS + HEADS_BLOCK - 1) // HEADS_BLOCK
    angles = tl.arange(0, HALF_BLOCK)
    table_row = token if positions is None else tl.load(positions + token)
    factors = table + table_row * (2 * HALF) + angles
    cos = tl.load(factors, mask=angles < HALF, other=0.0)[None, :]  # [1, HALF]
    sin = tl.load(factors + HALF, mask=angles < HALF, other=0.0)[None, :]
    if block < query_blocks:
        norm_rotate_heads(
            q + token * q_token_stride,
            q_head_stride,
            q_weight,
            q_out + token * (HEADS * DIM),
            DIM,
            cos,
            sin,
            block * HEADS_BLOCK,
            eps,
            1.0,
            HEADS,
            DIM,
            HALF,
            HEADS_BLOCK,
            HALF_BLOCK,
            REST_BLOCK,
            INTERLEAVED,
            UNIT_OFFSET,
            None,
        )
    else:
        if PAGE > 0:
            slot = tl.load(slot_mapping + token)
            target = (slot // PAGE * (KV_HEADS * PAGE) + slot % PAGE) * DIM
            head_stride: tl.constexpr = PAGE * DIM
        else:
            target = token * (KV_HEADS * DIM)
            head_stride: tl.constexpr = DIM
        first_head = (block - query_blocks) * HEADS_BLOCK
        norm_rotate_heads(
            k + token * k_token_stride,
            k_head_stride,
            k_weight,
            k_out + target,
            head_stride,
            cos,
            sin,
            first_head,
            eps,
            k_factor,
            KV_HEADS,
            DIM,
            HALF,
            HEADS_BLOCK,
            HALF_BLOCK,
            REST_BLOCK,
            INTERLEAVED,
            UNIT_OFFSET,
            LARGEST,
        )
        if PAGE > 0:
            heads, dims = first_head + tl.arange(0, HEADS_BLOCK)[:, None], tl.arange(0, DIM_BLOCK)[None, :]
            inside = (heads < KV_HEADS) & (dims < DIM)
            values = tl.load(v + token * v_token_stride + heads * v_head_stride + dims, mask=inside, other=0.0)
            write(v_out + target + heads * head_stride + dims, values, inside, v_factor, LARGEST)


@triton.jit
def norm_rotate_heads(
    x,  # [HEADS, DIM] of one token
    head_stride,
    weight,  # [DIM], or None
    out,  # [HEADS, DIM] of one token
    out_head_stride: tl.constexpr,
    cos,
    sin,
    first_head,
    eps,
    factor,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    UNIT_OFFSET: tl.constexpr,
    LARGEST: tl.constexpr,
):
    heads, pairs = first_head + tl.arange(0, HEADS_BLOCK)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
    inside = (heads < HEADS) & (pairs < HALF)
    if INTERLEAVED:
        first_dims = 2 * pairs
        second_dims = first_dims + 1
    else:
        first_dims = pairs
        second_dims = first_dims + HALF
    line, target = x + heads * head_stride, out + heads * out_head_stride
    first = tl.load(line + first_dims, mask=inside, other=0.0).to(tl.float32)  # [HEADS, HALF]
    second = tl.load(line + second_dims, mask=inside, other=0.0).to(tl.float32)
    if REST_BLOCK > 0:
        rest_dims = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        is_rest = (heads < HEADS) & (rest_dims < DIM)
        rest = tl.load(line + rest_dims, mask=is_rest, other=0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(first * first + second * second, axis=1)
        if REST_BLOCK > 0:
            squares += tl.sum(rest * rest, axis=1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        first = _scaled(first, scale, weight + first_dims, pairs < HALF, x.dtype.element_ty, UNIT_OFFSET)
        second = _scaled(second, scale, weight + second_dims, pairs < HALF, x.dtype.element_ty, UNIT_OFFSET)
        if REST_BLOCK > 0:
            rest = _scaled(rest, scale, weight + rest_dims, rest_dims < DIM, x.dtype.element_ty, UNIT_OFFSET)
    write(target + first_dims, (first * cos - second * sin).to(x.dtype.element_ty), inside, factor, LARGEST)
    write(target + second_dims, (second * cos + first * sin).to(x.dtype.element_ty), inside, factor, LARGEST)
    if REST_BLOCK > 0:
        write(target + rest_dims, rest.to(x.dtype.element_ty), is_rest, factor, LARGEST)


@triton.jit
def _scaled(x, scale, weight, mask, dtype: tl.constexpr, UNIT_OFFSET: tl.constexpr):
    """Return x * scale * weight, rounded to `dtype`, as float32 numbers."""
    weights = tl.load(weight, mask=mask, other=0.0).to(tl.float32)
    if UNIT_OFFSET:
        weights += 1.0
    return (x * scale * weights).to(dtype).to(tl.float32)


@triton.jit
def write(target, values, mask, factor, LARGEST: tl.constexpr):
    """Store the values. For a float8 target, first multiply them by the factor and clamp them to +- LARGEST."""
    if LARGEST is not None:
        values = tl.clamp(values.to(tl.float32) * factor, -LARGEST, LARGEST)
    tl.store(target, values.to(target.dtype.element_ty), mask=mask)
