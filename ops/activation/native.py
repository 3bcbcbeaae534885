"""Activations in plain torch."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.activation import SWIGLU_LIMIT, SWIGLU_SLOPE
from ops.matmul.rounded_rows import RoundedRows, round_rows


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square_()


_FUNCTIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": _relu2,
}


def gate(x: Tensor, activation: str) -> Tensor:
    """Return activation(first half) * second half (see `ops.activation`)."""
    gates, values = x.chunk(2, dim=-1)
    if activation == "clamped_swiglu":
        gates = gates.clamp(max=SWIGLU_LIMIT)
        values = values.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT).add_(1)
        return gates.mul((gates * SWIGLU_SLOPE).sigmoid_()).mul_(values)
    return _FUNCTIONS[activation](gates).mul_(values)


def gate_round(x: Tensor, activation: str, group: int) -> RoundedRows:
    """Return activation(first half) * second half, also rounded to float8 (see `ops.activation`)."""
    return round_rows(gate(x, activation), group)


def modulate(x: Tensor, gate: Tensor, activation: str) -> Tensor:
    """Return x * activation(gate) (see `ops.activation`)."""
    function = torch.sigmoid if activation == "sigmoid" else _FUNCTIONS[activation]
    return (x.float() * function(gate.float())).to(x.dtype)


def activate(x: Tensor, activation: str) -> Tensor:
    """Return activation(x) (see `ops.activation`)."""
    return _FUNCTIONS[activation](x)
