"""Matrix products in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.matmul.grouped import GroupedWeight


def prepare(weight: Tensor, *, bits: int | None = None) -> Tensor:
    """The weight as it is (see `ops.matmul`)."""
    if bits is not None:
        raise ValueError(f"Plain products take no weights of {bits} bits.")
    return weight


def prepare_grouped(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """The weight as a plain one (see `ops.matmul`)."""
    return weight.dequantised().to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias (see `ops.matmul`)."""
    return F.linear(x, weight, bias)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T (see `ops.matmul`)."""
    return linear(x, weight)
