"""Gated activations in plain torch."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor

_FUNCTIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def gate(x: Tensor, activation: str) -> Tensor:
    """activation(first half) * second half (see `ops.activation`)."""
    gates, values = x.chunk(2, dim=-1)
    return _FUNCTIONS[activation](gates).mul_(values)
