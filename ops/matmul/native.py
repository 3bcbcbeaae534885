"""Matrix products in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def prepare(weight: Tensor, *, bits: int | None = None) -> Tensor:
    """The weight as it is (see `ops.matmul`)."""
    if bits is not None:
        raise ValueError(f"Plain products take no weights of {bits} bits.")
    return weight


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias (see `ops.matmul`)."""
    return F.linear(x, weight, bias)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T (see `ops.matmul`)."""
    return linear(x, weight)
