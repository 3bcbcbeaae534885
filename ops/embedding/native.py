"""Embedding and logits in plain torch."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def embed(
    token_ids: Tensor, weight: Tensor, first_id: int | None = None, *, scale: float | None = None
) -> Tensor:
    """The vectors of a rank's own ids (see `ops.embedding`)."""
    vectors = look_up(F.embedding, token_ids, weight, first_id)
    return vectors if scale is None else vectors.mul_(scale)


def look_up(
    rows: Callable[[Tensor, Tensor], Tensor], token_ids: Tensor, weight: Tensor, first_id: int | None
) -> Tensor:
    """`embed` by `rows(indices [T], weight)`, which takes indices within the weight alone."""
    if first_id is None:
        return rows(token_ids, weight)
    indices = token_ids - first_id
    elsewhere = (indices < 0) | (indices >= len(weight))
    return rows(indices.masked_fill(elsewhere, 0), weight).masked_fill_(elsewhere.unsqueeze(1), 0)


def embed_placed(
    token_ids: Tensor, words: Tensor, positions: Tensor, places: Tensor | None, type: Tensor | None
) -> Tensor:
    """The vectors of words, of their positions and of their type (see `ops.embedding`)."""
    x = F.embedding(token_ids, words)
    x = x if type is None else x + type
    return x if places is None else x + F.embedding(positions, places)


def reads(prepared: Tensor) -> bool:
    """Plain weights only (see `ops.embedding`)."""
    return False


def as_logits(products: Tensor, *, scale: float | None = None, soft_cap: float | None = None) -> Tensor:
    """Scaled and bounded in float32 (see `ops.embedding`)."""
    logits = products.float()
    if soft_cap is not None:
        return logits.mul_((scale or 1.0) / soft_cap).tanh_().mul_(soft_cap)
    return logits if scale is None else logits.mul_(scale)
