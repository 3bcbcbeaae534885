"""The cases of rotary position embedding, for every implementation."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    rotated: int = 8
    interleaved: bool = False
    dtype: torch.dtype = torch.float32
    fused: bool = False  # queries and keys are slices of one tensor
    positions: tuple[int, ...] = (7, 0, 19)


CASES = {
    "halves": Case(),
    "interleaved": Case(interleaved=True),
    "partial": Case(rotated=4),
    "partial and interleaved": Case(rotated=4, interleaved=True),
    "numbers of heads and angles that are no powers of two": Case(3, 1, 12, 12),
    "half precision": Case(dtype=torch.float16),
    "bfloat16": Case(dtype=torch.bfloat16, interleaved=True),
    "a vector and a half": Case(head_dim=48, rotated=48, dtype=torch.bfloat16, fused=True),
    "a vector and a quarter": Case(head_dim=40, rotated=40),
    "interleaved vectors": Case(head_dim=48, rotated=40, interleaved=True),
    "slices of one tensor": Case(fused=True, rotated=4),
    "one token": Case(positions=(3,)),
}


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, table and positions."""
    generator = torch.Generator().manual_seed(3)
    heads = case.num_heads + case.num_kv_heads
    both = torch.randn(len(case.positions), heads, case.head_dim, generator=generator).to(case.dtype)
    q, k = both[:, : case.num_heads], both[:, case.num_heads :]
    if not case.fused:
        q, k = q.contiguous(), k.contiguous()
    angles = torch.rand(20, case.rotated // 2, generator=generator) * 6
    return (
        q,
        k,
        torch.cat((angles.cos(), angles.sin()), dim=-1),
        torch.tensor(case.positions, dtype=torch.int64),
    )


def outputs(backend: ModuleType, case: Case) -> list[Tensor]:
    return list(backend.rotate(*inputs(case), interleaved=case.interleaved, plan_cache={}))


def expected(case: Case) -> list[Tensor]:
    """Pairs as complex numbers, turned by multiplication, in float64."""
    q, k, table, positions = inputs(case)
    cos, sin = table[positions].double().unsqueeze(1).chunk(2, dim=-1)
    return [_turned(x.double(), torch.complex(cos, sin), case) for x in (q, k)]


def _turned(x: Tensor, turn: Tensor, case: Case) -> Tensor:
    head = x[..., : case.rotated]
    first, second = (head[..., ::2], head[..., 1::2]) if case.interleaved else head.chunk(2, dim=-1)
    pairs = torch.complex(first.contiguous(), second.contiguous()) * turn
    parts = (pairs.real, pairs.imag)
    turned = torch.stack(parts, -1).flatten(-2) if case.interleaved else torch.cat(parts, -1)
    return torch.cat((turned, x[..., case.rotated :]), dim=-1)
