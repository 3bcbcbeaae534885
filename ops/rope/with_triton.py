"""Rotary position embedding in Triton, in place: what is not rotated is not touched."""

# The types of a launch are not those of its kernel.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from typing import Any

import triton
import triton.language as tl
from torch import Tensor


def rotate(
    q: Tensor,
    k: Tensor,
    table: Tensor,
    positions: Tensor,
    *,
    interleaved: bool = False,
    plan_cache: MutableMapping[Hashable, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by their positions' angles, in place (see `ops.rope`).

    `plan_cache` stays as it is: the kernel reads the table itself.
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
        num_warps=8 if num_heads * half > 2048 else 4,
    )
    return q, k


@triton.jit
def _rotate_kernel(
    q,  # [T, HEADS, D]
    k,  # [T, KV_HEADS, D]
    table,  # [N, 2 * HALF], cosines then sines
    positions,  # [T]
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
):
    token = tl.program_id(0).to(tl.int64)
    angles = tl.arange(0, HALF_BLOCK)
    line = table + tl.load(positions + token) * (2 * HALF) + angles
    cos = tl.load(line, mask=angles < HALF, other=0.0)[None, :]  # [1, HALF]
    sin = tl.load(line + HALF, mask=angles < HALF, other=0.0)[None, :]
    queries, keys = q + token * q_token_stride, k + token * k_token_stride
    _turn(queries, q_head_stride, cos, sin, HEADS, HEADS_BLOCK, HALF, HALF_BLOCK, INTERLEAVED)
    _turn(keys, k_head_stride, cos, sin, KV_HEADS, KV_HEADS_BLOCK, HALF, HALF_BLOCK, INTERLEAVED)


@triton.jit
def _turn(
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
        first_place = x + heads * head_stride + 2 * angles
        second_place = first_place + 1
    else:
        first_place = x + heads * head_stride + angles
        second_place = first_place + HALF
    first = tl.load(first_place, mask=inside, other=0.0).to(tl.float32)  # [HEADS, HALF]
    second = tl.load(second_place, mask=inside, other=0.0).to(tl.float32)
    tl.store(first_place, (first * cos - second * sin).to(x.dtype.element_ty), mask=inside)
    tl.store(second_place, (second * cos + first * sin).to(x.dtype.element_ty), mask=inside)
