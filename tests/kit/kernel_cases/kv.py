"""Test cases of cache writes and page copies, for every implementation."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.attention import AttentionMetadata

NUM_PAGES = 12


class Case(NamedTuple):
    page_size: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype = torch.float32
    k_scale: float = 1.0
    v_scale: float = 1.0
    fused: bool = False  # keys and values are slices of one tensor


CASES = {
    "pages of one": Case(1),
    "pages of four": Case(4),
    "sizes that are no powers of two": Case(4, 3, 20),
    "slices of one tensor": Case(16, fused=True),
    "rounded to half precision": Case(pool_dtype=torch.float16),
    "bfloat16": Case(dtype=torch.bfloat16, pool_dtype=torch.bfloat16),
    "fp8 e4m3 with scales, some too large": Case(
        pool_dtype=torch.float8_e4m3fn, k_scale=2**-8, v_scale=0.5, dtype=torch.float16
    ),
    "fp8 e5m2": Case(pool_dtype=torch.float8_e5m2, v_scale=2.0),
    "pages larger than a program": Case(64, 5, 16),
}


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, AttentionMetadata]:
    """Return k, v, both pools and the metadata of two rows."""
    generator = torch.Generator().manual_seed(2)
    both = torch.randn(4, 2 * case.num_kv_heads, case.head_dim, generator=generator)
    if case.pool_dtype.itemsize == 1:
        # Only values that fp8 represents exactly: Triton's interpreter loses the carry if rounding raises the exponent.
        both = both.to(case.pool_dtype).float()
    both = both.to(case.dtype)
    k, v = both[:, : case.num_kv_heads], both[:, case.num_kv_heads :]
    if not case.fused:
        k, v = k.contiguous(), v.contiguous()
    shape = (2, NUM_PAGES, case.num_kv_heads, case.page_size, case.head_dim)
    k_pool, v_pool = torch.randn(shape, generator=generator).to(case.pool_dtype)
    table = np.arange(NUM_PAGES, dtype=np.int32)[::-1].reshape(2, NUM_PAGES // 2).copy()
    return k, v, k_pool, v_pool, AttentionMetadata.build([2, 0], [3, 1], table, case.page_size)


def outputs(backend: ModuleType, case: Case) -> list[Tensor]:
    """Return both pools as float32: after a store, after copying pages 9 and 11 to 0 and 3 of the same pool, and to 0
    and 1 of a smaller pool.
    """
    k, v, k_pool, v_pool, places = inputs(case)
    backend.store(k, v, k_pool, v_pool, places, k_scale=case.k_scale, v_scale=case.v_scale)
    stored = [k_pool.float(), v_pool.float()]
    sources = torch.tensor([9, 11])
    other = torch.zeros_like(v_pool[:3]).repeat(1, 2, 1, 1)[:, : v_pool.shape[1]]  # pages with a gap after each
    for pool in (k_pool, v_pool):
        backend.copy_pages([pool], [pool], sources, torch.tensor([0, 3]))
    backend.copy_pages([v_pool], [other], sources, torch.tensor([0, 1]))
    return [*stored, k_pool.float(), v_pool.float(), other.float()]


def expected(case: Case) -> list[Tensor]:
    """Compute one token and one page after another."""
    k, v, k_pool, v_pool, places = inputs(case)
    for new, pool, scale in ((k, k_pool, case.k_scale), (v, v_pool, case.v_scale)):
        for token, slot in enumerate(places.slot_mapping.tolist()):
            value = new[token].float() / scale
            if case.pool_dtype.itemsize == 1:
                largest = torch.finfo(case.pool_dtype).max
                value = value.clamp(-largest, largest)
            pool[slot // case.page_size, :, slot % case.page_size] = value.to(case.pool_dtype)
    copies = [k_pool.float(), v_pool.float()]
    for pool in copies:
        pool[0], pool[3] = pool[9].clone(), pool[11].clone()
    other = torch.stack([v_pool[9], v_pool[11], torch.zeros_like(v_pool[0])]).float()
    return [k_pool.float(), v_pool.float(), *copies, other]
