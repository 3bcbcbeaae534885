"""Normalisation in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    """Normalise the last dimension (see `ops.norm`)."""
    wide = x.float()
    factor = weight.float() + 1 if unit_offset else weight.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * factor).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Add, then normalise; returns both (see `ops.norm`)."""
    residual = residual + x
    return rms_norm(residual, weight, eps, unit_offset=unit_offset), residual
