"""Cache writes in plain torch."""

from __future__ import annotations

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
    """Put each token's keys and values at its slot (see `ops.kv`)."""
    _, num_kv_heads, page_size, head_dim = k_pool.shape
    key = (__name__, num_kv_heads)
    if key not in metadata.plan_cache:
        pages, offsets = metadata.slot_mapping // page_size, metadata.slot_mapping % page_size
        heads = torch.arange(num_kv_heads, device=pages.device)
        lines = (pages.unsqueeze(1) * num_kv_heads + heads) * page_size + offsets.unsqueeze(1)
        metadata.plan_cache[key] = lines.flatten()  # [T * K], index into the pool seen as [P * K * page, D]
    for new, pool, scale in ((k, k_pool, k_scale), (v, v_pool, v_scale)):
        lines = _converted(new.reshape(-1, head_dim), pool.dtype, scale)
        # Copied as bytes where torch cannot index the dtype.
        plain = torch.uint8 if pool.dtype.itemsize == 1 else pool.dtype
        pool.view(plain).view(-1, head_dim).index_copy_(0, metadata.plan_cache[key], lines.view(plain))


def copy_pages(k_pool: Tensor, v_pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Copy whole pages within both pools (see `ops.kv`)."""
    for pool in (k_pool, v_pool):
        plain = pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool
        plain.index_copy_(0, targets, plain.index_select(0, sources))


def _converted(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    if dtype.itemsize > 1:
        return values.to(dtype)
    largest = torch.finfo(dtype).max
    return (values.float() * (1.0 / scale)).clamp(-largest, largest).to(dtype)
