"""LoRA in torch: computes the products of one adapter slot after another."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.low_rank import LowRank


def add_low_rank(y: Tensor, x: Tensor, weights: LowRank, slots: Tensor) -> Tensor:
    """Add `B (A x)` to y in place, with A and B from each token's slot. Waits for the device (see `ops.low_rank`)."""
    ranks, ends = weights.ranks.tolist(), weights.ends.tolist()
    for slot in torch.unique(slots).tolist():
        rank = ranks[slot - 1] if slot else 0
        if not rank:
            continue
        tokens = torch.nonzero(slots == slot)[:, 0]
        rows, start = x[tokens].float(), 0
        for part, end in enumerate(ends):
            shrunk = rows @ weights.a[slot - 1, part, :rank].float().T
            added = shrunk @ weights.b[slot - 1, :rank, start:end].float()
            y[tokens, start:end] = (y[tokens, start:end].float() + added).to(y.dtype)
            start = end
    return y
