"""Embedding and logits in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def embed(
    token_ids: Tensor,
    weight: Tensor,
    first_id: int | None = None,
    *,
    scale: float | None = None,
    media: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return the vectors of the ids in a rank's part of the vocabulary (see `ops.embedding`)."""
    if media is not None:
        vectors = embed(token_ids.masked_fill(media[1], 0), weight, first_id, scale=scale)
        return torch.where(media[1].unsqueeze(1), media[0], vectors)
    vectors = look_up(F.embedding, token_ids, weight, first_id)
    return vectors if scale is None else vectors.mul_(scale)


def look_up(
    rows: Callable[[Tensor, Tensor], Tensor], token_ids: Tensor, weight: Tensor, first_id: int | None
) -> Tensor:
    """Return the vectors of the ids in a rank's part of the vocabulary, and zeros for other ids.

    `rows(indices [T], weight)` looks up rows of the weight. It is called with valid indices only.
    """
    if first_id is None:
        return rows(token_ids, weight)
    indices = token_ids - first_id
    outside = (indices < 0) | (indices >= len(weight))
    return rows(indices.masked_fill(outside, 0), weight).masked_fill_(outside.unsqueeze(1), 0)


def embed_with_positions(
    token_ids: Tensor,
    weight: Tensor,
    positions: Tensor,
    position_weight: Tensor | None,
    type_weight: Tensor | None,
    second_starts: Tensor | None,
) -> Tensor:
    """Return the sum of the tokens', positions' and types' vectors (see `ops.embedding`)."""
    x = F.embedding(token_ids, weight)
    if type_weight is not None:
        if second_starts is None:
            x = x + type_weight[0]
        else:
            x = x + type_weight[((second_starts > 0) & (positions >= second_starts)).long()]
    return x if position_weight is None else x + F.embedding(positions, position_weight)


def reads(prepared: Tensor) -> bool:
    """Return False: `embed` accepts only unprepared weights (see `ops.embedding`)."""
    return False


def as_logits(products: Tensor, *, scale: float | None = None, soft_cap: float | None = None) -> Tensor:
    """Return logits in float32, after scale and soft cap (see `ops.embedding`)."""
    logits = products.float()
    if soft_cap is not None:
        return logits.mul_((scale or 1.0) / soft_cap).tanh_().mul_(soft_cap)
    return logits if scale is None else logits.mul_(scale)
