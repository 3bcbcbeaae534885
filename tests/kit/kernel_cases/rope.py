"""Test cases of rotary position embedding, for every implementation."""

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
    axis_of_pair: tuple[int, ...] = ()  # position axis of each pair; (): positions have one axis


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
    "three axes": Case(axis_of_pair=(0, 0, 1, 2)),
    "three axes by turns, partial": Case(rotated=6, dtype=torch.bfloat16, fused=True, axis_of_pair=(2, 1, 0)),
}


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, table and positions."""
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


def axes(case: Case) -> Tensor:
    """Return the positions on three axes, [3, T]."""
    positions = torch.tensor(case.positions, dtype=torch.int64)
    return torch.stack([positions, (positions * 3 + 1) % 20, (positions * 7 + 2) % 20])


def outputs(backend: ModuleType, case: Case) -> list[Tensor]:
    q, k, table, positions = inputs(case)
    if case.axis_of_pair:
        table = backend.angles(table, axes(case), torch.tensor(case.axis_of_pair, dtype=torch.int32))
        positions = None
    return list(backend.rotate(q, k, table, positions, interleaved=case.interleaved, plan_cache={}))


def expected(case: Case) -> list[Tensor]:
    """Rotate pairs as complex numbers, in float64."""
    q, k, table, positions = inputs(case)
    lines = table[positions]
    if case.axis_of_pair:
        of_axes = table[axes(case)]  # [3, T, R]
        order = case.axis_of_pair * 2  # axis of each cosine, then of each sine
        lines = torch.stack([of_axes[axis, :, place] for place, axis in enumerate(order)], dim=-1)
    cos, sin = lines.double().unsqueeze(1).chunk(2, dim=-1)
    return [_turned(x.double(), torch.complex(cos, sin), case) for x in (q, k)]


def _turned(x: Tensor, turn: Tensor, case: Case) -> Tensor:
    head = x[..., : case.rotated]
    first, second = (head[..., ::2], head[..., 1::2]) if case.interleaved else head.chunk(2, dim=-1)
    pairs = torch.complex(first.contiguous(), second.contiguous()) * turn
    parts = (pairs.real, pairs.imag)
    turned = torch.stack(parts, -1).flatten(-2) if case.interleaved else torch.cat(parts, -1)
    return torch.cat((turned, x[..., case.rotated :]), dim=-1)
