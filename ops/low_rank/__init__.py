"""Low-rank additions to the output of a linear layer (LoRA, arXiv 2106.09685). Tokens may use different adapters.

A backend file defines

    add_low_rank(y [T, O], x [T, I], weights, slots [T]) -> y        y += B (A x), in place

A and B are the matrices in the token's slot (`LowRank`). Slot 0 adds nothing. A x is computed and kept in float32. The
dtype of y is that of x or float32, and the sum is rounded to it once. A token's result does not depend on other tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LowRank(NamedTuple):
    """The low-rank weights of one linear layer in S slots. The layer has P sub-layers, each with its own A.

    Slot s > 0 is at index s - 1 of `a`, `b` and `ranks`. Entries beyond a slot's rank are never read.
    """

    a: Tensor  # [S, P, R, I]
    b: Tensor  # [S, R, O], column o is multiplied with the product A x of the sub-layer that has output o
    ranks: Tensor  # int32 [S]; 0: the slot adds nothing to this layer
    ends: Tensor  # int64 [P], end of each sub-layer's output columns; the last element is O
