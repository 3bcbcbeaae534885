"""Mixtures of experts against a computation of one pair after another."""

from __future__ import annotations

import pytest
import torch

from kernel_cases.moe import CASES, Case, expected, inputs, outputs
from kernel_comparison import agree
from ops.moe import Mixture, native


@pytest.mark.parametrize("name", CASES)
def test_native_follows_the_formula_in_every_case(name: str) -> None:
    agree(outputs(native, CASES[name]), expected(CASES[name]))


def test_types_are_those_of_the_contract() -> None:
    logits, x, gate_up, down = inputs(Case(dtype=torch.bfloat16))
    weights, experts = native.route(logits, 2, renormalise=True)
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int32)
    mixed = native.mix(x, Mixture(gate_up, down), weights, experts, "silu")
    assert (mixed.shape, mixed.dtype) == (x.shape, torch.bfloat16)


def test_a_token_gives_the_same_alone_and_among_others() -> None:
    logits, x, gate_up, down = inputs(Case(9))
    weights, experts = native.route(logits, 2, renormalise=True)
    together = native.mix(x, Mixture(gate_up, down), weights, experts, "silu")
    for row in range(9):
        one = slice(row, row + 1)
        alone = native.mix(x[one], Mixture(gate_up, down), weights[one], experts[one], "silu")
        torch.testing.assert_close(alone, together[one])
