"""Cache writes and page copies in C++."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ops.attention import AttentionMetadata
from ops.attention.with_cpp import step_in
from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import TYPES, address, cache_type, contiguous_tokens
from ops.cpp.structures import CopyPages, Store
from ops.kv import native

BYTES_AT_ONCE = 16  # number of float8 elements that the kernel converts at a time; it must divide the head dim


def make(launcher: KernelLauncher) -> Mapping[str, Callable[..., Any]]:
    """Return `store` and `copy_pages` (see `ops.kv`). `native` writes to pools that the kernel does not support."""

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
        """Write each token's keys and values to its slot."""
        type = cache_type(k_pool, k.dtype)
        if type is None or k.dtype not in TYPES or (type and k.shape[2] % BYTES_AT_ONCE):
            native.store(k, v, k_pool, v_pool, metadata, k_scale=k_scale, v_scale=v_scale)
            return
        k, v = contiguous_tokens(k), contiguous_tokens(v)
        operands = Store(
            k=address(k),
            v=address(v),
            k_pool=address(k_pool),
            v_pool=address(v_pool),
            k_stride=k.stride(0),
            v_stride=v.stride(0),
            num_kv_heads=k.shape[1],
            head_dim=k.shape[2],
            type=type,
            k_steps=1 / k_scale,
            v_steps=1 / v_scale,
        )
        launcher.launch("store", k.dtype, operands, step_in(metadata))

    def copy_pages(
        sources: Sequence[Tensor], targets: Sequence[Tensor], source_pages: Tensor, target_pages: Tensor
    ) -> None:
        """Copy pages between pools."""
        pools = np.array([_pool_pair(*pair) for pair in zip(sources, targets, strict=True)], np.int64)
        source_pages, target_pages = source_pages.contiguous(), target_pages.contiguous()
        operands = CopyPages(
            pools=pools.ctypes.data,
            source_pages=address(source_pages),
            target_pages=address(target_pages),
            num_pools=len(pools),
            num_pages=len(source_pages),
        )
        launcher.launch("copy_pages", torch.float32, operands)

    return {"store": store, "copy_pages": copy_pages}


def _pool_pair(source: Tensor, target: Tensor) -> tuple[int, int, int, int, int]:
    """Return the fields of a `PoolPair` (see `small.h`)."""
    size = source.itemsize
    page_bytes = prod(source.shape[1:]) * size
    return source.data_ptr(), target.data_ptr(), source.stride(0) * size, target.stride(0) * size, page_bytes
