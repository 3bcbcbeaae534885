"""The cases of low-rank additions, for every implementation."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ops.low_rank import LowRank


class Case(NamedTuple):
    slots: tuple[int, ...]  # of each token
    ranks: tuple[int, ...] = (4, 0, 3, 8)  # of each slot
    rank: int = 8
    size: int = 40
    sizes: tuple[int, ...] = (24,)  # outputs of each sub-layer
    dtype: torch.dtype = torch.float32
    out_dtype: torch.dtype | None = None  # of y, if it differs from `dtype`


CASES = {
    "one token": Case((1,)),
    "no adapter": Case((0, 0)),
    "a slot that leaves the layer alone": Case((2, 1, 2)),
    "mixed": Case((4, 0, 1, 3, 1, 2, 4, 4)),
    "sub-layers": Case((1, 3, 0, 4), sizes=(33, 7, 300)),
    "many tokens of one slot": Case((4,) * 75 + (0,) * 3 + (1,) * 40, size=129, sizes=(64, 270)),
    "odd sizes": Case((1, 3), ranks=(1, 16, 13), rank=16, size=17, sizes=(5,)),
    "bfloat16": Case((1, 4, 0, 3), sizes=(64, 32), dtype=torch.bfloat16),
    "half precision": Case((1, 4, 0, 3), sizes=(64, 32), dtype=torch.float16),
}


def inputs(case: Case, device: str = "cpu") -> tuple[Tensor, Tensor, LowRank, Tensor]:
    """y, x, weights and slots. What a slot does not use is NaN."""
    random = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(case.dtype)

    num_slots, num_tokens, out = len(case.ranks), len(case.slots), sum(case.sizes)
    a = drawn(num_slots, len(case.sizes), case.rank, case.size) / case.size**0.5
    b = drawn(num_slots, case.rank, out) / case.rank**0.5
    for slot, rank in enumerate(case.ranks):
        a[slot, :, rank:], b[slot, rank:] = torch.nan, torch.nan
    ends = torch.tensor(case.sizes).cumsum(0)
    weights = LowRank(a, b, torch.tensor(case.ranks, dtype=torch.int32), ends)
    y = drawn(num_tokens, out).to(case.out_dtype or case.dtype)
    x, slots = drawn(num_tokens, case.size), torch.tensor(case.slots, dtype=torch.int32)
    return y.to(device), x.to(device), LowRank(*(each.to(device) for each in weights)), slots.to(device)


def outputs(backend: ModuleType, case: Case, device: str = "cpu") -> list[Tensor]:
    return [backend.add_low_rank(*inputs(case, device)).cpu()]


def expected(case: Case) -> list[Tensor]:
    """Token by token, in float64."""
    y, x, weights, _ = inputs(case)
    y = y.double()
    for token, slot in enumerate(case.slots):
        rank, start = case.ranks[slot - 1] if slot else 0, 0
        for part, size in enumerate(case.sizes):
            columns = slice(start, start + size)
            shrunk = weights.a[slot - 1, part, :rank].double() @ x[token].double()
            y[token, columns] += shrunk @ weights.b[slot - 1, :rank, columns].double()
            start += size
    return [y]
