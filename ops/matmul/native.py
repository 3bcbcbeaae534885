"""Matrix products in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.matmul.grouped import GroupedWeight


def prepare(weight: Tensor, *, bits: int | None = None) -> Tensor:
    """Return the weight unchanged (see `ops.matmul`)."""
    if bits is not None:
        raise ValueError(f"The native backend does not support weights with {bits} bits.")
    return weight


def prepare_grouped(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """Return the dequantised weight (see `ops.matmul`)."""
    return weight.dequantised().to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias (see `ops.matmul`)."""
    return F.linear(x, weight, bias)


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight.T (see `ops.matmul`)."""
    return linear(x, weight)


def row_group(weight: Tensor) -> int | None:
    """Return None: this backend does not round rows (see `ops.matmul`)."""
    return None
