"""Test cases of gated activations, for every implementation."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    activation: str
    shape: tuple[int, ...] = (3, 10)
    dtype: torch.dtype = torch.float32


CASES = {
    "silu": Case("silu"),
    "gelu": Case("gelu"),
    "gelu_tanh": Case("gelu_tanh"),
    "relu": Case("relu"),
    "relu2": Case("relu2"),
    "clamped_swiglu": Case("clamped_swiglu", (5, 40)),
    "wider than a program": Case("silu", (2, 2 * 1100)),
    "three dimensions": Case("gelu", (2, 3, 6)),
    "half precision": Case("silu", (4, 64), torch.float16),
    "bfloat16": Case("gelu_tanh", (4, 64), torch.bfloat16),
}


def inputs(case: Case) -> Tensor:
    return (4 * torch.randn(case.shape, generator=torch.Generator().manual_seed(5))).to(case.dtype)


def outputs(backend: ModuleType, case: Case) -> list[Tensor]:
    return [backend.gate(inputs(case), case.activation)]


def expected(case: Case) -> list[Tensor]:
    """Return the results of the formulas in float64."""
    g, value = inputs(case).double().chunk(2, dim=-1)
    active = {
        "silu": g / (1 + torch.exp(-g)),
        "gelu": 0.5 * g * (1 + torch.erf(g / 2**0.5)),
        "gelu_tanh": 0.5 * g * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3))),
        "relu": g.clamp(min=0),
        "relu2": g.clamp(min=0) ** 2,
        "clamped_swiglu": g.clamp(max=7) / (1 + torch.exp(-1.702 * g.clamp(max=7))),
    }[case.activation]
    if case.activation == "clamped_swiglu":
        value = value.clamp(-7, 7) + 1
    return [active * value]


# name -> (case, inputs per scale)
ROUND_CASES = {
    "one scale per row": (Case("silu", (3, 2 * 72)), 72),
    "groups of 32": (Case("gelu_tanh", (4, 2 * 96)), 32),
    "half precision": (Case("clamped_swiglu", (4, 64), torch.float16), 16),
    "bfloat16": (Case("silu", (4, 64), torch.bfloat16), 32),
    "wider than a program": (Case("silu", (2, 2 * 1152), torch.float16), 128),
    "a long row with one scale": (Case("silu", (2, 2 * 1100), torch.float16), 1100),
}
