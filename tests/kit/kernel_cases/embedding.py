"""Test cases of embedding and logits, for every implementation."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    vocab_size: int = 9  # size of a rank's part of the vocabulary
    width: int = 24
    first_id: int | None = None
    dtype: torch.dtype = torch.float32
    scale: float | None = None
    soft_cap: float | None = None
    with_media: bool = False  # whether vectors replace some tokens


CASES = {
    "the whole vocabulary": Case(),
    "the first part": Case(first_id=0),
    "a later part": Case(first_id=7),
    "a part without any of the ids": Case(first_id=100),
    "vectors wider than a program, a vocabulary as well": Case(1100, 1100, first_id=3),
    "half precision": Case(dtype=torch.float16, first_id=5),
    "bfloat16": Case(dtype=torch.bfloat16),
    "scaled": Case(scale=0.25),
    "vectors in the places of some ids": Case(scale=0.25, with_media=True),
    "wide vectors in the places of some ids": Case(9, 1100, dtype=torch.bfloat16, with_media=True),
    "soft cap": Case(soft_cap=2.0),
    "scaled, then capped, in half precision": Case(dtype=torch.float16, scale=3.0, soft_cap=1.5),
}


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return token ids, the weight, and products of three rows.

    In memory the weight is followed by the next rank's weight, so a kernel that reads beyond the end finds no zeros.
    """
    generator = torch.Generator().manual_seed(9)
    weight = torch.randn(2 * case.vocab_size, case.width, generator=generator).to(case.dtype)[: case.vocab_size]
    products = (3 * torch.randn(3, case.vocab_size, generator=generator)).to(case.dtype)
    high = case.vocab_size if case.first_id is None else 2 * case.vocab_size
    return torch.randint(0, high, (6,), generator=generator), weight, products


def outputs(backend: ModuleType, case: Case) -> list[Tensor]:
    """Return the vectors and the logits."""
    token_ids, weight, products = inputs(case)
    logits = backend.as_logits(products, scale=case.scale, soft_cap=case.soft_cap)
    more = {"media": media(case)} if case.with_media else {}
    if case.with_media:
        token_ids = token_ids.masked_fill(media(case)[1], -5)  # the ids of replaced tokens must be ignored
    return [backend.embed(token_ids, weight, case.first_id, scale=case.scale, **more), logits]


def media(case: Case) -> tuple[Tensor, Tensor]:
    """Return vectors for the six ids, and the mask of ids that they replace."""
    generator = torch.Generator().manual_seed(10)
    vectors = torch.randn(6, case.width, generator=generator).to(case.dtype)
    return vectors, torch.tensor([True, False, False, True, True, False])


def expected(case: Case) -> list[Tensor]:
    """Compute one id after another, with the formula in float64."""
    token_ids, weight, products = inputs(case)
    rows = [token_id - (case.first_id or 0) for token_id in token_ids.tolist()]
    nothing = torch.zeros(case.width, dtype=torch.float64)
    scale = 1.0 if case.scale is None else case.scale
    vectors = [scale * weight[row].double() if 0 <= row < case.vocab_size else nothing for row in rows]
    if case.with_media:
        given, mask = media(case)
        vectors = [own.double() if taken else vector for own, taken, vector in zip(given, mask, vectors)]
    logits = products.double() * scale
    if case.soft_cap is not None:
        logits = case.soft_cap * torch.tanh(logits / case.soft_cap)
    return [torch.stack(vectors), logits]
