"""Attention of single tokens by two batched matrix products of oneDNN, for bfloat16 on a CPU.

Torch's own attention multiplies each row and kv head alone. Where that is not done by AMX it costs 6 to 9 us each,
several times what a batched product needs. Prompts, other dtypes and small batches go to `native`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.attention import Attend, AttentionMetadata, AttentionOptions, native

MIN_PRODUCTS = 32  # rows x kv heads; with fewer the operations cost what they save


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    metadata: AttentionMetadata,
    options: AttentionOptions,
) -> Tensor:
    """Attention of every row over its pages (see `ops.attention`)."""
    return native.attend(q, k_pool, v_pool, metadata, options, attend_gathered=_by_products)


def make_attend() -> Attend:
    """`attend` itself: there is nothing to set."""
    return attend


def _by_products(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scoring: native.Scoring) -> Tensor:
    """[N, K, G, D] queries over [N, K, S, D] keys and values; see `native.dense`."""
    num_rows, num_kv_heads = q.shape[:2]
    small = num_rows * num_kv_heads < MIN_PRODUCTS
    if small or not scoring.is_plain or not q.dtype == k.dtype == torch.bfloat16:
        return native.dense(q, k, v, mask, scoring)
    queries, keys, values = (x.flatten(0, 1) for x in (q, k.transpose(2, 3), v))
    # A product adds in float32 and rounds once, to bfloat16, which is too coarse for an exponent: a second one gives
    # what the first has rounded away, and their sum has 16 bits.
    rounded = torch.bmm(queries, keys)  # [N * K, G, S]
    scores = torch.baddbmm(rounded, queries, keys, beta=-1).float().add_(rounded).mul_(scoring.scale)
    if mask is not None:
        scores.unflatten(0, (num_rows, num_kv_heads)).add_(mask)
    return torch.bmm(scores.softmax(-1).to(v.dtype), values).view_as(q)
