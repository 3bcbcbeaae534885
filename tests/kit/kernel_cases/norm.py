"""The cases of normalisation, for every implementation."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    unit_offset: bool = False
    sliced: bool = False  # heads cut out of wider tokens, as queries are


CASES = {
    "one short row": Case((1, 8)),
    "a width that is no power of two": Case((3, 72)),
    "rows that fill no whole program": Case((5, 3, 64)),
    "unit offset": Case((2, 40), unit_offset=True),
    "half precision": Case((4, 64), torch.float16),
    "bfloat16 with unit offset": Case((3, 96), torch.bfloat16, unit_offset=True),
    "heads of a wider token": Case((4, 3, 16), sliced=True),
    "a row longer than a tile": Case((2, 1100)),
}
EPS = 1e-3


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual and weight."""
    generator = torch.Generator().manual_seed(7)
    wide = (*case.shape[:-2], 2 * case.shape[-2], case.shape[-1]) if case.sliced else case.shape
    x = torch.randn(wide, generator=generator)[..., : case.shape[-2], :].to(case.dtype)
    residual = (3 * torch.randn(case.shape, generator=generator)).to(case.dtype)
    return x, residual, torch.randn(case.shape[-1], generator=generator).to(case.dtype)


def outputs(backend: ModuleType, case: Case) -> list[Tensor]:
    """The norm, then the norm of the sum and the sum."""
    x, residual, weight = inputs(case)
    results = [backend.rms_norm(x, weight, EPS, unit_offset=case.unit_offset)]
    if x.dim() == 2:
        results += backend.add_rms_norm(x.clone(), residual, weight, EPS, unit_offset=case.unit_offset)
    return results


def expected(case: Case) -> list[Tensor]:
    """The formula, in float64."""
    x, residual, weight = (t.double() for t in inputs(case))
    factor = weight + 1 if case.unit_offset else weight

    def norm(values: Tensor) -> Tensor:
        return values / torch.sqrt((values**2).mean(-1, keepdim=True) + EPS) * factor

    if x.dim() != 2:
        return [norm(x)]
    total = (x + residual).to(case.dtype).double()
    return [norm(x), norm(total), total]
