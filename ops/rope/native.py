"""Rotary position embedding in plain torch."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from typing import Any

import torch
from torch import Tensor


def rotate(
    q: Tensor,
    k: Tensor,
    table: Tensor,
    positions: Tensor,
    *,
    interleaved: bool = False,
    plan_cache: MutableMapping[Hashable, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by their positions' angles (see `ops.rope`)."""
    key = (__name__, id(table), interleaved)
    if plan_cache is None or key not in plan_cache:
        factors = _factors(table, positions, interleaved)
        if plan_cache is None:
            plan_cache = {}
        plan_cache[key] = factors
    cos, sin = plan_cache[key]
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def _factors(table: Tensor, positions: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """What each number is multiplied by, and what its partner in the pair: [T, 1, R] both."""
    cos, sin = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R / 2]
    if interleaved:
        return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    size = cos.shape[-1]
    turned, passed = x[..., :size].float(), x[..., size:]
    if interleaved:
        partners = turned.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partners = torch.cat(turned.chunk(2, dim=-1)[::-1], dim=-1)
    result = partners.mul_(sin).addcmul_(turned, cos).to(x.dtype)
    return torch.cat((result, passed), dim=-1) if passed.shape[-1] else result
