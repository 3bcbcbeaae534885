"""Cache writes and page copies in Triton: one program for each token, or page and head."""

# The types of a launch are not those of its kernel.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.attention import AttentionMetadata

COPY_BLOCK = 2048  # elements of a page that one program copies


def store(
    k: Tensor,
    v: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    metadata: AttentionMetadata,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Put each token's keys and values at its slot (see `ops.kv`)."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    _, num_kv_heads, page_size, head_dim = k_pool.shape
    _store_kernel[(len(metadata.slot_mapping),)](
        k,
        v,
        k_pool,
        v_pool,
        metadata.slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        1.0 / k_scale,
        1.0 / v_scale,
        LARGEST=torch.finfo(k_pool.dtype).max if k_pool.dtype.itemsize == 1 else None,
        HEADS=num_kv_heads,
        DIM=head_dim,
        PAGE=page_size,
        HEADS_BLOCK=triton.next_power_of_2(num_kv_heads),
        DIM_BLOCK=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


def copy_pages(k_pool: Tensor, v_pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy whole pages within both pools (see `ops.kv`)."""
    page_elements = k_pool[0].numel()
    grid = (len(sources), triton.cdiv(page_elements, COPY_BLOCK))
    _copy_kernel[grid](k_pool, v_pool, sources, targets, page_elements, BLOCK=COPY_BLOCK)


@triton.jit
def _store_kernel(
    k,  # [T, HEADS, DIM]
    v,
    k_pool,  # [P, HEADS, PAGE, DIM]
    v_pool,
    slot_mapping,  # [T]
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_factor,
    v_factor,
    LARGEST: tl.constexpr,  # that an fp8 pool holds; None for wider dtypes
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS_BLOCK: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    heads, dims = tl.arange(0, HEADS_BLOCK)[:, None], tl.arange(0, DIM_BLOCK)[None, :]
    inside = (heads < HEADS) & (dims < DIM)
    offset = ((slot // PAGE * HEADS + heads) * PAGE + slot % PAGE) * DIM + dims
    keys = tl.load(k + token * k_token_stride + heads * k_head_stride + dims, mask=inside, other=0.0)
    values = tl.load(v + token * v_token_stride + heads * v_head_stride + dims, mask=inside, other=0.0)
    if LARGEST is not None:
        keys = tl.clamp(keys.to(tl.float32) * k_factor, -LARGEST, LARGEST)
        values = tl.clamp(values.to(tl.float32) * v_factor, -LARGEST, LARGEST)
    tl.store(k_pool + offset, keys.to(k_pool.dtype.element_ty), mask=inside)
    tl.store(v_pool + offset, values.to(v_pool.dtype.element_ty), mask=inside)


@triton.jit
def _copy_kernel(
    k_pool,  # [P, page_elements]
    v_pool,
    sources,  # [N]
    targets,  # [N]
    page_elements,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0)
    source, target = tl.load(sources + pair), tl.load(targets + pair)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < page_elements
    keys = tl.load(k_pool + source * page_elements + offsets, mask=inside)
    values = tl.load(v_pool + source * page_elements + offsets, mask=inside)
    tl.store(k_pool + target * page_elements + offsets, keys, mask=inside)
    tl.store(v_pool + target * page_elements + offsets, values, mask=inside)
