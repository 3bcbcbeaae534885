"""Norm of latent vectors, rotation and cache write of latent attention in one Triton kernel.

Of each token's programs, the first normalises the latent vector, rotates the key and stores both. Each of the others
rotates several query heads.
"""

# Pyright cannot check the arguments of kernel launches.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.attention import AttentionMetadata
from ops.rope import LatentNorm, Rotation
from ops.rope.triton_fused import PAIRS, norm_rotate_heads, write


def rotate_store_latent(
    q_pe: Tensor,
    latent: Tensor,
    k_pe: Tensor,
    norm: LatentNorm,
    pool: Tensor,
    metadata: AttentionMetadata,
    rotation: Rotation,
) -> Tensor:
    """Normalise and store latent vectors, rotate queries and keys (see `ops.rope`). Returns new queries."""
    q_pe, latent, k_pe = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_pe, latent, k_pe))
    (num_tokens, num_heads, rope_dim), rank = q_pe.shape, latent.shape[1]
    half = rotation.table.shape[1] // 2
    half_block, rest = triton.next_power_of_2(half), rope_dim - 2 * half
    heads = min(max(1, PAIRS // half_block), triton.next_power_of_2(num_heads))
    out = torch.empty(q_pe.shape, dtype=q_pe.dtype, device=q_pe.device)
    _rotate_store_latent_kernel[(num_tokens, 1 + triton.cdiv(num_heads, heads))](
        q_pe,
        latent,
        k_pe,
        norm.weight,
        out,
        pool,
        rotation.table,
        rotation.positions,
        metadata.slot_mapping,
        q_pe.stride(0),
        q_pe.stride(1),
        latent.stride(0),
        k_pe.stride(0),
        norm.eps,
        HEADS=num_heads,
        RANK=rank,
        DIM=rope_dim,
        HALF=half,
        HEADS_BLOCK=heads,
        RANK_BLOCK=triton.next_power_of_2(rank),
        HALF_BLOCK=half_block,
        REST_BLOCK=triton.next_power_of_2(rest) if rest else 0,
        INTERLEAVED=rotation.interleaved,
        LARGEST=torch.finfo(pool.dtype).max if pool.dtype.itemsize == 1 else None,
        num_warps=4,
    )
    return out


@triton.jit
def _rotate_store_latent_kernel(
    q,  # [T, HEADS, DIM]
    latent,  # [T, RANK]
    k,  # [T, DIM]
    weight,  # [RANK]
    q_out,  # [T, HEADS, DIM]
    pool,  # [slots, RANK + DIM]
    table,  # [N, 2 * HALF], cosines then sines
    positions,  # [T]; None: row t of the table belongs to token t
    slot_mapping,  # [T]
    q_token_stride,
    q_head_stride,
    latent_stride,
    k_stride,
    eps,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,  # 0 if all dimensions are rotated
    INTERLEAVED: tl.constexpr,
    LARGEST: tl.constexpr,  # largest value of a float8 pool, to which keys are clamped; None: other dtypes
):
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles = tl.arange(0, HALF_BLOCK)
    table_row = token if positions is None else tl.load(positions + token)
    factors = table + table_row * (2 * HALF) + angles
    cos = tl.load(factors, mask=angles < HALF, other=0.0)[None, :]  # [1, HALF]
    sin = tl.load(factors + HALF, mask=angles < HALF, other=0.0)[None, :]
    if block > 0:
        norm_rotate_heads(
            q + token * q_token_stride,
            q_head_stride,
            None,
            q_out + token * (HEADS * DIM),
            DIM,
            cos,
            sin,
            (block - 1) * HEADS_BLOCK,
            eps,
            1.0,
            HEADS,
            DIM,
            HALF,
            HEADS_BLOCK,
            HALF_BLOCK,
            REST_BLOCK,
            INTERLEAVED,
            False,
            None,
        )
    else:
        target = pool + tl.load(slot_mapping + token) * (RANK + DIM)
        dims = tl.arange(0, RANK_BLOCK)
        inside = dims < RANK
        x = tl.load(latent + token * latent_stride + dims, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / RANK + eps)
        weights = tl.load(weight + dims, mask=inside, other=0.0).to(tl.float32)
        write(target + dims, (x * scale * weights).to(latent.dtype.element_ty), inside, 1.0, LARGEST)
        norm_rotate_heads(
            k + token * k_stride,
            DIM,
            None,
            target + RANK,
            DIM,
            cos,
            sin,
            0,
            eps,
            1.0,
            1,
            DIM,
            HALF,
            1,
            HALF_BLOCK,
            REST_BLOCK,
            INTERLEAVED,
            False,
            LARGEST,
        )
