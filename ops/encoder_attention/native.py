"""Bidirectional attention with torch's scaled_dot_product_attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.attention import AttentionMetadata

MIN_BLOCK = 256  # minimum number of queries per block if `reach` limits the keys


Bias = Callable[[int], Tensor]


def attend_bidirectional(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    reach: int | None = None,
    bias: Bias | None = None,
) -> Tensor:
    """Return the attention output [T, H, D] of rows that attend to themselves (see `ops.encoder_attention`)."""
    counts = metadata.counts_host
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if q.is_cuda and len(set(counts)) > 1:
        return _padded(q, k, v, counts, scale, reach, bias)
    first = 0
    for length, rows in groupby(counts):  # adjacent rows of equal length share one call
        end = first + length * sum(1 for _ in rows)
        # Each tensor is [N, H, L, D]: N rows of L tokens.
        queries, keys, values, result = (
            x[first:end].unflatten(0, (-1, length)).transpose(1, 2) for x in (q, k, v, out)
        )
        if reach is None or length <= reach + 1:
            mask = None if bias is None else bias(length)
            result.copy_(F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale))
        elif bias is not None:
            raise ValueError("`bias` cannot be combined with `reach`.")
        else:
            _attend_near(queries, keys, values, result, reach, scale)
        first = end
    return out


def _attend_near(q: Tensor, k: Tensor, v: Tensor, out: Tensor, reach: int, scale: float) -> None:
    """Write the attention of rows [N, H, L, D] to `out`, in blocks of queries. A block skips most keys out of reach."""
    length = q.shape[2]
    block = max(reach, MIN_BLOCK)
    for low in range(0, length, block):
        high = min(low + block, length)
        first, end = max(0, low - reach), min(length, high + reach)
        positions = torch.arange(first, end, device=q.device)
        near = (positions - torch.arange(low, high, device=q.device).unsqueeze(1)).abs() <= reach
        keys, values = k[:, :, first:end], v[:, :, first:end]
        out[:, :, low:high] = F.scaled_dot_product_attention(
            q[:, :, low:high], keys, values, attn_mask=near, scale=scale
        )


def _padded(
    q: Tensor, k: Tensor, v: Tensor, counts: Sequence[int], scale: float, reach: int | None, bias: Bias | None
) -> Tensor:
    """Compute all rows in one call, padded to the longest row. On a GPU, this is faster than one launch per row."""
    num_rows, width = len(counts), max(counts)
    index = torch.cat([torch.arange(count) + row * width for row, count in enumerate(counts)])
    index = index.to(q.device, non_blocking=True)
    lengths = torch.tensor(counts).to(q.device, non_blocking=True)
    positions = torch.arange(width, device=q.device)
    mask = (positions < lengths.unsqueeze(1))[:, None, None]  # [N, 1, 1, width]
    if reach is not None:  # some padding queries then have no key, and their results, NaN, are dropped
        mask = mask & ((positions - positions.unsqueeze(1)).abs() <= reach)
    if bias is not None:
        mask = bias(width).masked_fill(~mask, -torch.inf)

    def padded(x: Tensor) -> Tensor:
        filled = x.new_zeros(num_rows * width, *x.shape[1:]).index_copy_(0, index, x)
        return filled.unflatten(0, (num_rows, width)).transpose(1, 2)

    out = F.scaled_dot_product_attention(padded(q), padded(k), padded(v), attn_mask=mask, scale=scale)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, index)
