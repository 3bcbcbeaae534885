"""Test cases of sampling, for every implementation."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.sampling import NO_LIMIT, Masks, SamplingArrays

OFF = NO_LIMIT["top_k"]
ROWS = 4


class Case(NamedTuple):
    arrays: dict[str, Any] = {}
    vocab_size: int = 100
    levels: int | None = None  # number of different logits; further logits repeat them
    forbidden: float = 0.0  # share of logits that are -inf
    spoil: float | None = None  # value of one logit of row 1


CASES = {
    "greedy": Case({"greedy": True}),
    "greedy among equals": Case({"greedy": True}, levels=3),
    "greedy among equals, over blocks": Case({"greedy": True}, vocab_size=13000, levels=3),
    "temperature alone": Case({"temperature": 0.7}),
    "a vocabulary of more than one block": Case({"temperature": 3.0}, vocab_size=5000),
    "top_k": Case({"top_k": [1, 3, 40, 99]}),
    "top_k among equals": Case({"top_k": [1, 7, 40, 99]}, levels=4),
    "top_p": Case({"top_p": [0.05, 0.5, 0.9, 0.999], "temperature": 2.0}),
    "top_p among equals": Case({"top_p": [0.05, 0.5, 0.9, 0.999], "temperature": 2.0}, levels=4),
    "min_p": Case({"min_p": [0.01, 0.1, 0.5, 1.0], "temperature": 1.5}),
    "all limits": Case({"top_k": 20, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5}),
    "all limits among equals, over blocks": Case(
        {"top_k": 3000, "top_p": 0.8, "temperature": 1.5}, vocab_size=5000, levels=5
    ),
    "rows of every kind": Case(
        {"greedy": [True, False, False, False], "top_k": [OFF, 5, OFF, OFF], "top_p": [1.0, 1.0, 0.7, 1.0]}
    ),
    "top_k of one among zeros of both signs": Case({"top_k": 1}, levels=3),
    "top_k and min_p": Case({"top_k": 50, "min_p": 0.3, "temperature": 2.0}),
    "XTC": Case({"xtc_probability": 1.0, "xtc_threshold": [0.0, 0.01, 0.05, 0.9], "top_p": [1.0, 0.9, 1.0, 1.0]}),
    "typical_p": Case({"typical_p": [0.1, 0.5, 1.0, 0.9], "min_p": [0.0, 0.0, 0.0, 0.1]}),
    "forbidden tokens": Case({"top_k": [OFF, 90, OFF, 90], "top_p": [0.9, 1.0, 1.0, 0.9]}, forbidden=0.5),
    "not a number": Case(spoil=float("nan")),
    "infinite": Case({"greedy": [False, True, False, True]}, spoil=float("inf")),
}
UNIFORMS = ((0.0, 0.25, 0.5, 0.99999994), (0.9, 0.1, 0.7, 0.3))


def rows(count: int, **fields: Any) -> SamplingArrays:
    """Return arrays of `count` rows. A field is one value for all rows, or one per row. Limits are off by default."""
    values = {"greedy": False, "temperature": 1.0, **NO_LIMIT, "xtc_threshold": 0.1, "uniform": 0.5, **fields}
    dtypes = {"greedy": torch.bool, "top_k": torch.int32}
    return SamplingArrays(
        **{
            name: torch.as_tensor(value, dtype=dtypes.get(name, torch.float32)).expand(count).contiguous()
            for name, value in values.items()
        }
    )


def arrays(case: Case, uniforms: tuple[float, ...]) -> SamplingArrays:
    return rows(ROWS, **case.arrays, uniform=uniforms)


def logits(case: Case) -> Tensor:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(ROWS, case.vocab_size, generator=generator) * 3
    if case.levels is not None:
        x = torch.randint(-case.levels // 2, case.levels // 2, x.shape, generator=generator) * 0.5
        x[:, 0] = -0.0
    x[torch.rand(x.shape, generator=generator) < case.forbidden] = -torch.inf
    if case.spoil is not None:
        x[1, 5] = case.spoil
    return x


def outputs(backend: ModuleType, case: Case) -> list[Tensor]:
    """Return ids and soundness, for each set of uniform numbers."""
    return [x for u in UNIFORMS for x in backend.choose(logits(case), arrays(case, u))]


def penalized(backend: ModuleType, vocab_size: int = 100) -> Tensor:
    """Return logits after penalties on rows 3 and 1."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(ROWS, vocab_size, generator=generator)
    counts = torch.randint(0, 3, (3, vocab_size), dtype=torch.int32, generator=generator)
    in_prompt = torch.rand(3, vocab_size, generator=generator) < 0.3
    penalties = torch.tensor([[0.5, 0.0], [0.25, 1.5], [1.3, 0.8]])
    backend.penalize(x, torch.tensor([3, 1]), torch.tensor([0, 2]), counts, in_prompt, *penalties)
    return x


def masked(backend: ModuleType, vocab_size: int = 100, spare_words: int = 0) -> Tensor:
    """Return logits after masks on rows 2 and 0, whose bits cover all cases."""
    generator = torch.Generator().manual_seed(6)
    x, words = torch.randn(ROWS, vocab_size, generator=generator), -(-vocab_size // 32) + spare_words
    bitmask = torch.randint(-(2**31), 2**31, (2, words), generator=generator).to(torch.int32)
    bitmask[0, :2] = torch.tensor([-1, 0])
    backend.choose(x, arrays(Case(), UNIFORMS[0]), masks=Masks(torch.tensor([2, 0]), bitmask))
    return x


def scored(backend: ModuleType, vocab_size: int = 100, num_top: int = 3) -> list[Tensor]:
    x = logits(Case(vocab_size=vocab_size, levels=20, forbidden=0.1))
    requested = torch.tensor([[1, 2], [7, 7], [0, 99], [50, 3]])
    temperature = torch.tensor([1.0, 0.3, 2.0, 1.0])
    return list(backend.score(x, temperature, torch.tensor([0, 9, 20, 99]), num_top, requested))
