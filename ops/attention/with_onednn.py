"""Attention of single-token rows with two batched matrix products of oneDNN, for bfloat16 on a CPU.

torch's attention computes a product for each row and kv head. On a CPU without AMX, such a product takes 6 to 9 us,
several times as long as within a batched product. `native` computes longer rows, other dtypes and small batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.attention import Attend, AttentionMetadata, AttentionOptions, native

MIN_PRODUCTS = 32  # minimum of rows x kv heads; with fewer, `native.dense` is faster


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    metadata: AttentionMetadata,
    options: AttentionOptions,
) -> Tensor:
    return native.attend(q, k_pool, v_pool, metadata, options, attend_gathered=_by_products)


def make_attend() -> Attend:
    """Return `attend`. It has no settings."""
    return attend


def _by_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: native.Scoring) -> Tensor:
    """Compute attention of queries [N, K, G, D] over keys and values [N, K, S, D] (see `native.dense`)."""
    num_rows, num_kv_heads = q.shape[:2]
    small = num_rows * num_kv_heads < MIN_PRODUCTS
    if small or not scoring.is_plain or not q.dtype == k.dtype == torch.bfloat16:
        return native.dense(q, k, v, mask, scoring)
    queries, keys, values = (x.flatten(0, 1) for x in (q, k.transpose(2, 3), v))
    # The product is rounded to bfloat16, which is too coarse for an exponent. A second product computes the rounding
    # error of the first, so that their sum has 16 significant bits.
    rounded = torch.bmm(queries, keys)  # [N * K, G, S]
    scores = torch.baddbmm(rounded, queries, keys, beta=-1).float().add_(rounded).mul_(scoring.scale)
    if mask is not None:
        scores.unflatten(0, (num_rows, num_kv_heads)).add_(mask)
    return torch.bmm(scores.softmax(-1).to(v.dtype), values).view_as(q)
