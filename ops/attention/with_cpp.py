"""Attention in C++. One call computes all rows, and the kernel reads keys and values in their pages without a copy.

A token's result does not depend on other rows, on how its prompt is divided into chunks, or on the number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.attention import Attend, AttentionMetadata, AttentionOptions, native
from ops.cpp import structures
from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.library import TYPES, address, cache_type, contiguous_tokens

NUM_PARTS = 2**22  # size of the scratch memory for partial results, in float32 elements
HEAD_DIM_MULTIPLE = 16


def make_attend(launcher: KernelLauncher) -> Attend:
    """Return an `attend` (see `ops.attention`).

    Dtypes and head sizes that the C++ kernel does not support are computed in torch (`native`).
    """
    parts = torch.empty(NUM_PARTS)

    def attend(
        q: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        metadata: AttentionMetadata,
        options: AttentionOptions,
    ) -> Tensor:
        """Compute attention of every row over its pages."""
        if not computes(q.dtype, q.shape[2], k_pool):
            return native.attend(q, k_pool, v_pool, metadata, options)
        q = contiguous_tokens(q)
        out = launcher.empty(q.shape, q.dtype)
        operands = structures.Attend(
            q=address(q),
            q_stride=q.stride(0),
            k_pool=address(k_pool),
            v_pool=address(v_pool),
            out=address(out),
            num_heads=q.shape[1],
            num_kv_heads=k_pool.shape[1],
            head_dim=q.shape[2],
            window=options.window or 0,
            chunked=options.chunked,
            scale=options.scale * options.k_scale,
            soft_cap=options.soft_cap or 0.0,
            sinks=address(options.sinks),
            slopes=address(options.slopes),
            parts=address(parts),
            num_parts=NUM_PARTS,
            type=cache_type(k_pool, q.dtype),
            v_scale=options.v_scale,
            below=options.below or 0,
        )
        launcher.launch("attend", q.dtype, operands, step_in(metadata))
        return out

    return attend


def computes(dtype: torch.dtype, head_dim: int, k_pool: Tensor) -> bool:
    """Return whether the C++ kernel supports queries of this dtype and head dimension, and the pool's dtype."""
    known = dtype in TYPES and cache_type(k_pool, dtype) is not None
    return known and head_dim % HEAD_DIM_MULTIPLE == 0


def step_in(metadata: AttentionMetadata) -> structures.Step:
    """Return the metadata as a `Step`, with the addresses of its tensors. It is built once per step for all layers."""
    key = (__name__, "step")
    if key not in metadata.plan_cache:
        metadata.plan_cache[key] = structures.Step(
            num_tokens=len(metadata.slot_mapping),
            num_rows=len(metadata.counts_host),
            slot_mapping=address(metadata.slot_mapping),
            page_table=address(metadata.page_table),
            table_width=metadata.page_table.stride(0),
            starts=address(metadata.starts),
            counts=address(metadata.counts),
            query_starts=address(metadata.query_starts),
            page_size=metadata.page_size,
        )
    return metadata.plan_cache[key]
