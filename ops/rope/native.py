"""Rotary position embedding in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(
    q: Tensor, k: Tensor, table: Tensor, positions: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by their positions' angles (see `ops.rope`)."""
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R / 2]
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    half = cos.shape[-1]
    turned, passed = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., :half], turned[..., half:]
    pairs = (first * cos - second * sin, second * cos + first * sin)
    result = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    result = result.to(x.dtype)
    return torch.cat((result, passed), dim=-1) if passed.shape[-1] else result
