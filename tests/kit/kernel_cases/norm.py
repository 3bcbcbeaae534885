"""Test cases of normalisation, for every implementation."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ops.matmul.rounded_rows import RoundedRows


class Case(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    unit_offset: bool = False
    sliced: bool = False  # heads are slices of wider tokens, like queries
    centred: bool = False  # whether to subtract the mean (layer normalisation)
    bias: bool = False


CASES = {
    "one short row": Case((1, 8)),
    "a width that is no power of two": Case((3, 72)),
    "rows that fill no whole program": Case((5, 3, 64)),
    "unit offset": Case((2, 40), unit_offset=True),
    "half precision": Case((4, 64), torch.float16),
    "bfloat16 with unit offset": Case((3, 96), torch.bfloat16, unit_offset=True),
    "heads of a wider token": Case((4, 3, 16), sliced=True),
    "a row longer than a tile": Case((2, 1100)),
    "centred": Case((3, 72), centred=True),
    "centred, with a bias": Case((3, 72), centred=True, bias=True),
    "centred heads of a wider token": Case((4, 3, 16), sliced=True, centred=True),
    "centred half precision with a bias": Case((4, 64), torch.float16, centred=True, bias=True),
    "centred bfloat16": Case((3, 96), torch.bfloat16, centred=True),
}
EPS = 1e-3


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, residual, weight and bias. The mean of the values is far from 0."""
    generator = torch.Generator().manual_seed(7)
    wide = (*case.shape[:-2], 2 * case.shape[-2], case.shape[-1]) if case.sliced else case.shape
    x = torch.randn(wide, generator=generator).add(0.5)[..., : case.shape[-2], :].to(case.dtype)
    residual = (3 * torch.randn(case.shape, generator=generator)).to(case.dtype)
    weight, bias = torch.randn(2, case.shape[-1], generator=generator).to(case.dtype)
    return x, residual, weight, bias


def outputs(backend: ModuleType, case: Case) -> list[Tensor]:
    """Return the norm of x, then the norm of the sum and the sum."""
    x, residual, weight, bias = inputs(case)
    if case.centred:
        norm = partial(backend.layer_norm, weight=weight, bias=bias if case.bias else None, eps=EPS)
        add_norm = partial(backend.add_layer_norm, weight=weight, bias=bias if case.bias else None, eps=EPS)
    else:
        norm = partial(backend.rms_norm, weight=weight, eps=EPS, unit_offset=case.unit_offset)
        add_norm = partial(backend.add_rms_norm, weight=weight, eps=EPS, unit_offset=case.unit_offset)
    return [norm(x), *(add_norm(x.clone(), residual) if x.dim() == 2 else ())]


def expected(case: Case) -> list[Tensor]:
    """Return the result of the formula in float64."""
    x, residual, weight, bias = (t.double() for t in inputs(case))
    factor = weight + 1 if case.unit_offset else weight

    def norm(values: Tensor) -> Tensor:
        if case.centred:
            values = values - values.mean(-1, keepdim=True)
        normed = values / torch.sqrt((values**2).mean(-1, keepdim=True) + EPS) * factor
        return normed + bias if case.bias else normed

    if x.dim() != 2:
        return [norm(x)]
    total = (x + residual).to(case.dtype).double()
    return [norm(x), norm(total), total]


# rows, width, inputs per scale, dtype, unit offset
ROUND_CASES = {
    "one scale per row": (3, 72, 72, torch.float32, False),
    "groups of 32": (5, 96, 32, torch.float32, False),
    "half precision, unit offset": (2, 64, 16, torch.float16, True),
    "bfloat16, several rows per program": (9, 128, 128, torch.bfloat16, False),
    "a row longer than a tile": (2, 1100, 1100, torch.float16, False),
    "groups of a row longer than a tile": (3, 1152, 128, torch.float16, False),
}


def rounded(backend: ModuleType, name: str) -> tuple[RoundedRows, Tensor]:
    """Return the results of `add_rms_norm_round`. The first row has only zeros."""
    rows, width, group, dtype, unit_offset = ROUND_CASES[name]
    x, residual, weight, _ = inputs(Case((rows, width), dtype))
    x[0], residual[0] = 0, 0
    return backend.add_rms_norm_round(x, residual, weight, EPS, group, unit_offset=unit_offset)
