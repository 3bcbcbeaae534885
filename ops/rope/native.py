"""Rotary position embedding in torch."""

from __future__ import annotations

from collections.abc import Hashable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from ops.kv.native import store
from ops.latent.native import join
from ops.norm.native import rms_norm
from ops.rope.composed import compose


def rotate(
    q: Tensor,
    k: Tensor,
    table: Tensor,
    positions: Tensor | None,
    *,
    interleaved: bool = False,
    plan_cache: MutableMapping[Hashable, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    key = (__name__, id(table), interleaved)
    if plan_cache is None or key not in plan_cache:
        factors = _factors(table, positions, interleaved)
        if plan_cache is None:
            plan_cache = {}
        plan_cache[key] = factors
    cos, sin = plan_cache[key]
    return _rotate(q, cos, sin, interleaved), _rotate(k, cos, sin, interleaved)


def angles(table: Tensor, positions: Tensor, axis_of_pair: Tensor) -> Tensor:
    rows = positions[axis_of_pair].T  # [T, R / 2]
    return torch.cat([half.gather(0, rows) for half in table.chunk(2, dim=-1)], dim=-1)


def _factors(table: Tensor, positions: Tensor | None, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return two factors for each rotated element, [T, 1, R] each: of itself, and of the other element of its pair."""
    rows = table if positions is None else table.index_select(0, positions)
    cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)  # [T, 1, R / 2]
    if interleaved:
        return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    size = cos.shape[-1]
    rotated, rest = x[..., :size].float(), x[..., size:]
    if interleaved:
        partners = rotated.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    else:
        partners = torch.cat(rotated.chunk(2, dim=-1)[::-1], dim=-1)
    result = partners.mul_(sin).addcmul_(rotated, cos).to(x.dtype)
    return torch.cat((result, rest), dim=-1) if rest.shape[-1] else result


_composed = compose(rms_norm, rotate, store, join)
norm_rotate, rotate_store = _composed["norm_rotate"], _composed["rotate_store"]
rotate_store_latent = _composed["rotate_store_latent"]
