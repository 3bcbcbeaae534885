from __future__ import annotations

import pytest
import torch

from kernel_cases.norm import CASES, expected, outputs
from kernel_comparison import agree
from ops.norm import native
from ops.norm.native import add_rms_norm, rms_norm


@pytest.mark.parametrize("unit_offset", [False, True])
def test_norm_follows_its_formula(unit_offset) -> None:
    x, weight = torch.randn(5, 3, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    factor = weight + 1 if unit_offset else weight
    expected = x / torch.sqrt((x**2).mean(-1, keepdim=True) + 0.1) * factor
    out = rms_norm(x.float(), weight.float(), 0.1, unit_offset=unit_offset)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-5)


def test_added_norm_gives_the_norm_of_the_sum_and_the_sum() -> None:
    x, residual, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    total = x + residual
    normed, kept = add_rms_norm(x, residual, weight, 1e-5)
    torch.testing.assert_close(kept, total)
    torch.testing.assert_close(normed, rms_norm(total, weight, 1e-5))


def test_half_precision_is_rounded_once() -> None:
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(64).bfloat16()
    expected = rms_norm(x.float(), weight.float(), 1e-5).bfloat16()
    assert torch.equal(rms_norm(x, weight, 1e-5), expected)


@pytest.mark.parametrize("name", CASES)
def test_native_follows_the_formula_in_every_case(name) -> None:
    agree(outputs(native, CASES[name]), expected(CASES[name]))
