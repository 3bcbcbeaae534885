"""Low-rank additions to the output of a linear layer, another one for each token (LoRA, arXiv 2106.09685).

A backend file defines

    add_low_rank(y [T, O], x [T, I], weights, slots [T]) -> y        y += B (A x), in place

with A and B of each token's slot (`LowRank`); slot 0 adds nothing. A x is computed and kept in float32, and y is
rounded once. A token's result does not depend on the other tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LowRank(NamedTuple):
    """The low-rank weights of one linear layer in S slots. The layer has P sub-layers, each with an A of its own.

    Slot s > 0 is at index s - 1. Entries beyond a slot's rank are never read.
    """

    a: Tensor  # [S, P, R, I]
    b: Tensor  # [S, R, O], column o belongs to the sub-layer of output o
    ranks: Tensor  # int32 [S]; 0: the slot adds nothing to this layer
    ends: Tensor  # int64 [P], where each sub-layer's outputs end; the last is O
