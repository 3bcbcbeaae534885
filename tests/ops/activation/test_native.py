from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from kernel_cases.activation import CASES, expected, outputs
from kernel_comparison import agree
from ops.activation import ACTIVATIONS, native
from ops.activation.native import gate

EXPECTED = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x) ** 2,
}


@pytest.mark.parametrize("activation", [each for each in ACTIVATIONS if each in EXPECTED])
def test_first_half_gates_the_second(activation) -> None:
    x = torch.randn(3, 10)
    before = x.clone()
    torch.testing.assert_close(gate(x, activation), EXPECTED[activation](before[:, :5]) * before[:, 5:])


@pytest.mark.parametrize("name", CASES)
def test_native_follows_the_formula_in_every_case(name) -> None:
    agree(outputs(native, CASES[name]), expected(CASES[name]))
