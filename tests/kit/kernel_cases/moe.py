"""Test cases of mixtures of experts, for every implementation."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from kernel_cases.matmul import float8_scales
from ops.matmul.grouped import E2M1, GroupedWeight, GroupForm
from ops.moe import GroupedMixture, Mixture, native


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


# Formats of 4-bit experts: gpt-oss, NVFP4, GPTQ and AWQ.
FOUR_BITS = {
    "mxfp4": GroupForm(32, table=E2M1, shifted=False, powers=True),
    "nvfp4": GroupForm(16, table=E2M1, shifted=False),
    "integers": GroupForm(128, shifted=False),
    "integers with zeros": GroupForm(64),
}


def outputs_of_4_bits(backend: ModuleType, form: GroupForm, num_tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Return the output of a mixture with weights of this form and biases. Inner sizes are no multiples of 256."""
    generator, num_experts, size, inner_size = torch.Generator().manual_seed(9), 2, 384, 128

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def weight(out_size: int, in_size: int) -> GroupedWeight:
        codes = torch.randint(0, 16, (num_experts, out_size, in_size), generator=generator, dtype=torch.uint8)
        grid = (num_experts, out_size, in_size // form.group)
        exponents = torch.randint(-9, -6, grid, generator=generator).float()
        scales = exponents.exp2() if form.powers else 0.01 * (0.5 + draw(*grid).abs())
        if form == FOUR_BITS["nvfp4"]:
            scales = float8_scales(scales)
        shifts = 0.02 * draw(*grid) if form.shifted else None
        return GroupedWeight(codes, scales, shifts, form.table, powers=form.powers)

    gate_up, down = weight(2 * inner_size, size), weight(size, inner_size)
    biases = draw(num_experts, 2 * inner_size).to(dtype), draw(num_experts, size).to(dtype)
    mixture = backend.prepare_grouped_experts(GroupedMixture(gate_up, down, *biases), dtype)
    weights, experts = native.route(draw(num_tokens, num_experts), 2, renormalise=True)
    return [backend.mix(draw(num_tokens, size).to(dtype), mixture, weights, experts, "silu")]


def fused_experts(form: str) -> GroupedMixture:
    """Return random experts in "MXFP4" with biases, as in gpt-oss, in "NVFP4", or in "float8 blocks" of 128 x 128."""
    generator, num_experts = torch.Generator().manual_seed(3), 4
    size, inner_size = (384, 128) if form == "float8 blocks" else (160, 96)  # MXFP4 and NVFP4 are padded

    def draw(out_size: int, in_size: int) -> GroupedWeight:
        if form == "MXFP4":
            codes = torch.randint(0, 16, (num_experts, out_size, in_size), generator=generator, dtype=torch.uint8)
            exponents = torch.randint(-6, -2, (num_experts, out_size, in_size // 32), generator=generator)
            return GroupedWeight(codes, exponents.float().exp2(), table=E2M1, powers=True)
        if form == "NVFP4":
            codes = torch.randint(0, 16, (num_experts, out_size, in_size), generator=generator, dtype=torch.uint8)
            scales = (40 * torch.rand(num_experts, out_size, in_size // 16, generator=generator)).to(
                torch.float8_e4m3fn
            )
            inputs = 1e-3 * (1 + torch.rand(num_experts, 1, generator=generator))
            return GroupedWeight(codes, scales.float() * 3e-4, table=E2M1, input_scales=inputs)
        numbers = torch.randn(num_experts, out_size, in_size, generator=generator).to(torch.float8_e4m3fn)
        blocks = 0.5 + torch.rand(num_experts, out_size // 128, in_size // 128, generator=generator)
        scales = (blocks * in_size**-0.5).repeat_interleave(128, 1)
        return GroupedWeight(numbers.view(torch.uint8), scales, bits=8, floating=True)

    weights = draw(2 * inner_size, size), draw(size, inner_size)
    if form != "MXFP4":
        return GroupedMixture(*weights)
    biases = (torch.randn(num_experts, rows, generator=generator).bfloat16() for rows in (2 * inner_size, size))
    return GroupedMixture(*weights, *biases)


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
