"""Cache writes and page copies in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ops.attention import AttentionMetadata


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
    _, num_kv_heads, page_size, head_dim = k_pool.shape
    key = (__name__, num_kv_heads)
    if key not in metadata.plan_cache:
        pages, offsets = metadata.slot_mapping // page_size, metadata.slot_mapping % page_size
        heads = torch.arange(num_kv_heads, device=pages.device)
        index = (pages.unsqueeze(1) * num_kv_heads + heads) * page_size + offsets.unsqueeze(1)
        metadata.plan_cache[key] = index.flatten()  # [T * K], index into the pool viewed as [P * K * page, D]
    for new, pool, scale in ((k, k_pool, k_scale), (v, v_pool, v_scale)):
        vectors = _converted(new.reshape(-1, head_dim), pool.dtype, scale)
        # torch cannot index float8 tensors; copy them as bytes.
        index_dtype = torch.uint8 if pool.dtype.itemsize == 1 else pool.dtype
        pool.view(index_dtype).view(-1, head_dim).index_copy_(0, metadata.plan_cache[key], vectors.view(index_dtype))


def copy_pages(
    sources: Sequence[Tensor], targets: Sequence[Tensor], source_pages: Tensor, target_pages: Tensor
) -> None:
    """Copy pages between pools (see `ops.kv`). Waits for the GPU if a pool is in host memory."""
    for source, target in zip(sources, targets, strict=True):
        if source.dtype.itemsize == 1:  # torch cannot index float8 tensors; copy them as bytes
            source, target = source.view(torch.uint8), target.view(torch.uint8)
        pages = source.index_select(0, source_pages.to(source.device))
        target.index_copy_(0, target_pages.to(target.device), pages.to(target.device))


def _converted(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    if dtype.itemsize > 1:
        return values.to(dtype)
    largest = torch.finfo(dtype).max
    return (values.float() * (1.0 / scale)).clamp(-largest, largest).to(dtype)
