"""Test cases of mixtures of experts, for every implementation."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ops.moe import Mixture


class Case(NamedTuple):
    num_tokens: int = 7
    num_experts: int = 6
    top_k: int = 2
    size: int = 24
    inner_size: int = 20
    renormalise: bool = True
    scoring: str = "softmax"
    activation: str = "silu"
    dtype: torch.dtype = torch.float32
    levels: int | None = None  # number of different logits; further logits repeat them
    weigh_inputs: bool = False
    favourite: int | None = None  # an expert that every token selects
    elsewhere: int = 0  # number of experts, from 0, that another rank computes


CASES = {
    "a few tokens": Case(),
    "one token": Case(1),
    "scores as they are": Case(renormalise=False),
    "sigmoid": Case(scoring="sigmoid"),
    "sigmoid as they are": Case(scoring="sigmoid", renormalise=False),
    "weights of inputs": Case(scoring="sigmoid", renormalise=False, weigh_inputs=True),
    "equal logits": Case(levels=2, top_k=3),
    "one expert each": Case(top_k=1, renormalise=False),
    "all experts": Case(num_experts=4, top_k=4),
    "an expert of more than one tile": Case(40, favourite=3),
    "more experts than pairs": Case(2, 32),
    "products longer and wider than a tile": Case(3, 4, 2, 70, 72),
    "gelu": Case(activation="gelu_tanh"),
    "experts of another rank": Case(elsewhere=3),
    "no expert here": Case(elsewhere=6),
    "inputs of another rank": Case(40, top_k=3, weigh_inputs=True, elsewhere=2, favourite=1),
    "half precision": Case(dtype=torch.float16),
}


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return router logits, tokens, and the two weights of the experts."""
    generator = torch.Generator().manual_seed(8)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(shape, generator=generator)).to(case.dtype)

    logits = draw(case.num_tokens, case.num_experts, scale=2.0)
    if case.levels is not None:
        logits = torch.randint(0, case.levels, logits.shape, generator=generator).to(case.dtype)
    if case.favourite is not None:
        logits[:, case.favourite] = 9
    gate_up = draw(case.num_experts, 2 * case.inner_size, case.size, scale=case.size**-0.5)
    down = draw(case.num_experts, case.size, case.inner_size, scale=case.inner_size**-0.5)
    return logits, draw(case.num_tokens, case.size), gate_up, down


def outputs(backend: ModuleType, case: Case) -> list[Tensor]:
    """Return routing weights, experts and the mixture's output."""
    logits, x, gate_up, down = inputs(case)
    weights, experts = backend.route(logits, case.top_k, renormalise=case.renormalise, scoring=case.scoring)
    mixture = backend.prepare_experts(Mixture(gate_up, down))
    here = torch.where(experts < case.elsewhere, -1, experts)
    mixed = backend.mix(x, mixture, weights, here, case.activation, weigh_inputs=case.weigh_inputs)
    return [weights, experts.float(), mixed]


def expected(case: Case) -> list[Tensor]:
    """Compute one token and one expert after another, in float64."""
    logits, x, gate_up, down = (t.double() for t in inputs(case))
    all_weights, all_experts, mixed = [], [], []
    for token, line in zip(x, logits):
        ranked = sorted(range(case.num_experts), key=lambda expert: (-line[expert].item(), expert))
        experts = ranked[: case.top_k]
        scores = (torch.softmax(line, 0) if case.scoring == "softmax" else torch.sigmoid(line))[experts]
        weights = scores / scores.sum() if case.renormalise else scores
        total = torch.zeros_like(token)
        for weight, expert in zip(weights, experts):
            if expert < case.elsewhere:
                continue
            given, weight = (weight * token, 1) if case.weigh_inputs else (token, weight)
            g, value = (gate_up[expert] @ given).chunk(2)
            gelu = 0.5 * g * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (g + 0.044715 * g**3)))
            active = g / (1 + torch.exp(-g)) if case.activation == "silu" else gelu
            total += weight * (down[expert] @ (active * value))
        all_weights.append(weights)
        all_experts.append(torch.tensor(experts))
        mixed.append(total)
    return [torch.stack(all_weights), torch.stack(all_experts), torch.stack(mixed)]
