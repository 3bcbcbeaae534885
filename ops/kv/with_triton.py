"""Cache writes in Triton with one program per token, and page copies with one program per block of a page."""

# Pyright cannot check the arguments of kernel launches.
# pyright: reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.attention import AttentionMetadata

COPY_BLOCK = 2048  # elements that one program copies


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
    """Write each token's keys and values to its slot (see `ops.kv`)."""
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


def copy_pages(
    sources: Sequence[Tensor], targets: Sequence[Tensor], source_pages: Tensor, target_pages: Tensor
) -> None:
    """Copy pages between pools (see `ops.kv`)."""
    for source, target in zip(sources, targets, strict=True):
        page_elements = source[0].numel()
        grid = (len(source_pages), triton.cdiv(page_elements, COPY_BLOCK))
        _copy_kernel[grid](
            source,
            target,
            source_pages,
            target_pages,
            source.stride(0),
            target.stride(0),
            page_elements,
            BLOCK=COPY_BLOCK,
        )


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
    LARGEST: tl.constexpr,  # largest value of a float8 pool, to which k and v are clamped; None: other dtypes
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
    source,  # [P, page_elements]
    target,  # [P, page_elements]
    source_pages,  # [N]
    target_pages,  # [N]
    source_stride,
    target_stride,
    page_elements,
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0)
    source_page, target_page = tl.load(source_pages + pair), tl.load(target_pages + pair)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < page_elements
    values = tl.load(source + source_page * source_stride + offsets, mask=inside)
    tl.store(target + target_page * target_stride + offsets, values, mask=inside)
