"""Rotary position embedding in Triton, in place."""

# Pyright cannot check the arguments of kernel launches.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ops.rope.native import angles
from ops.rope.triton_fused import norm_rotate, rotate_store
from ops.rope.triton_latent import rotate_store_latent

__all__ = ["angles", "norm_rotate", "rotate", "rotate_store", "rotate_store_latent"]  # torch computes `angles`


def rotate(
    q: Tensor,
    k: Tensor,
    table: Tensor,
    positions: Tensor | None,
    *,
    interleaved: bool = False,
    plan_cache: MutableMapping[Hashable, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions' angles, in place (see `ops.rope`).

    The kernel reads the table and does not use `plan_cache`.
    """
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    (num_tokens, num_heads, _), num_kv_heads, half = q.shape, k.shape[1], table.shape[1] // 2
    _rotate_kernel[(num_tokens,)](
        q,
        k,
        table,
        positions,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        HALF=half,
        HEADS_BLOCK=triton.next_power_of_2(num_heads),
        KV_HEADS_BLOCK=triton.next_power_of_2(max(1, num_kv_heads)),
        HALF_BLOCK=triton.next_power_of_2(half),
        INTERLEAVED=interleaved,
        BY_TOKEN=positions is None,
        num_warps=8 if num_heads * half > 2048 else 4,
    )
    return q, k


@triton.jit
def _rotate_kernel(
    q,  # [T, HEADS, D]
    k,  # [T, KV_HEADS, D]
    table,  # [N, 2 * HALF], cosines then sines
    positions,  # [T]; None if BY_TOKEN
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    KV_HEADS_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BY_TOKEN: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    angles = tl.arange(0, HALF_BLOCK)
    table_row = token if BY_TOKEN else tl.load(positions + token)
    factors = table + table_row * (2 * HALF) + angles
    cos = tl.load(factors, mask=angles < HALF, other=0.0)[None, :]  # [1, HALF]
    sin = tl.load(factors + HALF, mask=angles < HALF, other=0.0)[None, :]
    queries, keys = q + token * q_token_stride, k + token * k_token_stride
    _rotate_heads(queries, q_head_stride, cos, sin, HEADS, HEADS_BLOCK, HALF, HALF_BLOCK, INTERLEAVED)
    _rotate_heads(keys, k_head_stride, cos, sin, KV_HEADS, KV_HEADS_BLOCK, HALF, HALF_BLOCK, INTERLEAVED)


@triton.jit
def _rotate_heads(
    x,  # [HEADS, D] of one token
    head_stride,
    cos,
    sin,
    HEADS: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    heads, angles = tl.arange(0, HEADS_BLOCK)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
    inside = (heads < HEADS) & (angles < HALF)
    if INTERLEAVED:
        first_address = x + heads * head_stride + 2 * angles
        second_address = first_address + 1
    else:
        first_address = x + heads * head_stride + angles
        second_address = first_address + HALF
    first = tl.load(first_address, mask=inside, other=0.0).to(tl.float32)  # [HEADS, HALF]
    second = tl.load(second_address, mask=inside, other=0.0).to(tl.float32)
    tl.store(first_address, (first * cos - second * sin).to(x.dtype.element_ty), mask=inside)
    tl.store(second_address, (second * cos + first * sin).to(x.dtype.element_ty), mask=inside)
