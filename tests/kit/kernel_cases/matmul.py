"""Test cases of products with grouped 4-bit weights, for every implementation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.matmul.grouped import E2M1, WHOLE, GroupedWeight


class Case(NamedTuple):
    num_rows: int = 5
    out_size: int = 70
    in_size: int = 96
    group: int = 32
    shifted: bool = False
    bias: bool = False
    table: tuple[float, ...] = WHOLE
    powers: bool = False
    float8_scales: bool = False  # whether scales are float8 numbers times a factor that rows share, as in NVFP4
    dtype: torch.dtype = torch.float32


CASES = {
    "one row": Case(1),
    "with zeros and a bias": Case(shifted=True, bias=True),
    "groups of 16": Case(out_size=33, group=16, shifted=True),
    "groups of more than a step": Case(3, 40, 256, 256, shifted=True),
    "groups of more than a step that it does not divide": Case(3, 40, 768, 384),
    "floats with exponents": Case(3, table=E2M1, powers=True),
    "floats in groups of 16": Case(group=16, table=E2M1, bias=True),
    "floats with float8 scales": Case(3, group=16, table=E2M1, bias=True, float8_scales=True),
    "more rows and float8 scales": Case(70, 150, 128, 16, table=E2M1, float8_scales=True),
    "more rows and outputs than a tile": Case(70, 150, 128, 64, bias=True),
}


def inputs(case: Case) -> tuple[Tensor, GroupedWeight, Tensor | None]:
    """Return x, the weight and a bias. Scales and zeros are representable in 16 bits."""
    generator = torch.Generator().manual_seed(6)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    groups = (case.out_size, case.in_size // case.group)
    scales = (0.02 * (0.5 + draw(*groups).abs())).bfloat16().float()
    if case.float8_scales:
        scales = float8_scales(scales)
    weight = GroupedWeight(
        torch.randint(0, 16, (case.out_size, case.in_size), generator=generator, dtype=torch.uint8),
        scales.log2().floor().exp2() if case.powers else scales,
        (0.05 * draw(*groups)).bfloat16().float() if case.shifted else None,
        case.table,
        powers=case.powers,
    )
    x = (draw(case.num_rows, case.in_size) * case.in_size**-0.5).to(case.dtype)
    return x, weight, draw(case.out_size).to(case.dtype) if case.bias else None


def float8_scales(scales: Tensor) -> Tensor:
    """Return scales [..., O, G] rounded to float8 numbers times a factor. Each third of the rows has its own factor."""
    factors = torch.tensor([0.0003, 0.00007, 0.00021]).repeat_interleave(-(-scales.shape[-2] // 3))
    factors = factors[: scales.shape[-2], None]
    return (scales / factors).to(torch.float8_e4m3fn).float() * factors


def of_module(module: Any) -> Any:
    """Return a backend's product of x with a weight that the backend packs."""

    def multiply(x: Tensor, weight: GroupedWeight, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        packed = module.prepare_grouped(weight, x.dtype)
        return module.linear(x, packed, bias), module.logits(x, packed).to(x.dtype)

    return SimpleNamespace(multiply=multiply)


def outputs(backend: Any, case: Case) -> list[Tensor]:
    backend = backend if hasattr(backend, "multiply") else of_module(backend)
    return list(backend.multiply(*inputs(case)))


def expected(case: Case) -> list[Tensor]:
    """Return the product in float64, rounded once."""
    x, weight, bias = inputs(case)
    product = x.double() @ weight.dequantised().double().T
    return [(product if bias is None else product + bias.double()).to(case.dtype), product.to(case.dtype)]
