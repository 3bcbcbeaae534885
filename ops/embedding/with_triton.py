"""Embedding and logits in Triton. Each kernel computes its output in one pass, without intermediate tensors."""

# Pyright cannot check the arguments of kernel launches.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.embedding.native import embed_with_positions

__all__ = ["as_logits", "embed", "embed_with_positions", "reads"]  # torch computes `embed_with_positions`
BLOCK = 1024


def embed(
    token_ids: Tensor,
    weight: Tensor,
    first_id: int | None = None,
    *,
    scale: float | None = None,
    media: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the vectors of the ids in a rank's part of the vocabulary (see `ops.embedding`)."""
    num_ids, width = weight.shape
    out = torch.empty((len(token_ids), width), dtype=weight.dtype, device=weight.device)
    vectors, mask = media or (None, None)
    _embed_kernel[(len(token_ids), triton.cdiv(width, BLOCK))](
        token_ids,
        weight,
        vectors,
        mask,
        out,
        first_id or 0,
        num_ids,
        width,
        weight.stride(0),
        1.0 if scale is None else scale,
        HAS_MEDIA=media is not None,
        BLOCK=min(BLOCK, triton.next_power_of_2(width)),
    )
    return out


def reads(prepared: Tensor) -> bool:
    """Return False: `embed` accepts only unprepared weights (see `ops.embedding`)."""
    return False


def as_logits(products: Tensor, *, scale: float | None = None, soft_cap: float | None = None) -> Tensor:
    """Return logits in float32, after scale and soft cap (see `ops.embedding`)."""
    if products.dtype == torch.float32 and scale is None and soft_cap is None:
        return products
    products = products if products.stride(-1) == 1 else products.contiguous()
    num_rows, width = products.shape
    out = torch.empty((num_rows, width), dtype=torch.float32, device=products.device)
    _logits_kernel[(num_rows, triton.cdiv(width, BLOCK))](
        products,
        out,
        width,
        products.stride(0),
        1.0 if scale is None else scale,
        SOFT_CAP=soft_cap,
        BLOCK=min(BLOCK, triton.next_power_of_2(width)),
    )
    return out


@triton.jit
def _embed_kernel(
    token_ids,  # [T]
    weight,  # [num_ids, width]
    vectors,  # [T, width], or None without media
    mask,  # [T], or None
    out,  # [T, width]
    first_id,
    num_ids,
    width,
    stride,
    vector_scale,
    HAS_MEDIA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    index = tl.load(token_ids + token) - first_id
    in_shard = (index >= 0) & (index < num_ids)
    if HAS_MEDIA:
        has_vector = tl.load(mask + token) != 0
        in_shard = in_shard & ~has_vector
    num_read = tl.where(in_shard, width, 0)
    vector = tl.load(weight + index * stride + columns, mask=columns < num_read, other=0.0)
    vector = vector.to(tl.float32) * vector_scale
    if HAS_MEDIA:
        inside = columns < tl.where(has_vector, width, 0)
        medium = tl.load(vectors + token * width + columns, mask=inside, other=0.0)
        vector = tl.where(has_vector, medium.to(tl.float32), vector)
    tl.store(out + token * width + columns, vector, mask=columns < width)


@triton.jit
def _logits_kernel(
    products,  # [R, width]
    out,  # [R, width]
    width,
    stride,
    scale,
    SOFT_CAP: tl.constexpr,  # None: no soft cap
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    logits = tl.load(products + row * stride + columns, mask=inside, other=0.0).to(tl.float32) * scale
    if SOFT_CAP is not None:
        logits = SOFT_CAP * (2.0 * tl.sigmoid(logits * (2.0 / SOFT_CAP)) - 1.0)  # computes tanh
    tl.store(out + row * width + columns, logits, mask=inside)
