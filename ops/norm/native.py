"""Normalisation in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.matmul.rounded_rows import RoundedRows, round_rows


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False) -> Tensor:
    factor = weight.float() + 1 if unit_offset else weight
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).mul_(factor).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, unit_offset: bool = False
) -> tuple[Tensor, Tensor]:
    """Add, then normalise. Return the normalised values and the sum (see `ops.norm`)."""
    residual = residual + x
    return rms_norm(residual, weight, eps, unit_offset=unit_offset), residual


def add_rms_norm_round(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, group: int, *, unit_offset: bool = False
) -> tuple[RoundedRows, Tensor]:
    """Add, normalise and round. Return the normalised values and the sum (see `ops.norm`)."""
    normed, residual = add_rms_norm(x, residual, weight, eps, unit_offset=unit_offset)
    return round_rows(normed, group), residual


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    normed = F.layer_norm(x.float(), x.shape[-1:], eps=eps).mul_(weight)
    return (normed if bias is None else normed.add_(bias)).to(x.dtype)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Add, then centre and normalise. Return the normalised values and the sum (see `ops.norm`)."""
    residual = residual + x
    return layer_norm(residual, weight, bias, eps), residual


def add(x: Tensor, y: Tensor, *, scale: float = 1.0, gate: Tensor | None = None) -> Tensor:
    if gate is not None:
        x = x * gate.sigmoid()
    return torch.add(y, x, alpha=scale)
