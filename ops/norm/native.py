"""Normalisation in plain torch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """Normalise the last dimension (see `ops.norm`)."""
    factor = weight.float() + 1 if unit_offset else weight
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).mul_(factor).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Add, then normalise; returns both (see `ops.norm`)."""
    residual = residual + x
    return rms_norm(residual, weight, eps, unit_offset=unit_offset), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Centre and normalise the last dimension (see `ops.norm`)."""
    offset = bias.float() if bias is not None else None
    return F.layer_norm(x.float(), x.shape[-1:], weight.float(), offset, eps).to(x.dtype)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Add, then centre and normalise; returns both (see `ops.norm`)."""
    residual = residual + x
    return layer_norm(residual, weight, bias, eps), residual
