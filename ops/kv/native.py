"""Cache writes in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.attention import AttentionInputs


def store(k: Tensor, v: Tensor, k_pool: Tensor, v_pool: Tensor, inputs: AttentionInputs) -> None:
    """Put each token's keys and values at its slot (see `ops.kv`)."""
    _, num_kv_heads, page_size, head_dim = k_pool.shape
    key = (__name__, num_kv_heads)
    if key not in inputs.memo:
        pages, offsets = inputs.slots // page_size, inputs.slots % page_size
        heads = torch.arange(num_kv_heads, device=pages.device)
        lines = (pages.unsqueeze(1) * num_kv_heads + heads) * page_size + offsets.unsqueeze(1)
        inputs.memo[key] = lines.flatten()  # [T * K], index into the pool seen as [P * K * page, D]
    for new, pool in ((k, k_pool), (v, v_pool)):
        lines = new.reshape(-1, head_dim).to(pool.dtype)
        pool.view(-1, head_dim).index_copy_(0, inputs.memo[key], lines)
