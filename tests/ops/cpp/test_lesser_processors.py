"""The kernels compiled for processors with fewer instruction sets: equal results except for rounding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cpp_kernels import DTYPES, LESSER, NO_MATRIX_UNIT, backend, drawn
from kernel_cases import activation, kv, norm, rope
from kernel_comparison import agree
from ops.machine import Machine

pytestmark = pytest.mark.slow
OPERATIONS = {"activation": activation, "kv": kv, "norm": norm, "rope": rope}


@pytest.mark.parametrize("processor", LESSER)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_small_operations_follow_their_formulas(processor: str, operation: str) -> None:
    cases = OPERATIONS[operation]
    lesser = backend(operation, 2, *LESSER[processor])
    for case in cases.CASES.values():
        if torch.float16 not in case and not getattr(case, "centred", False):  # the C++ kernels have no layer norm
            agree(cases.outputs(lesser, case), cases.expected(case))


@pytest.mark.parametrize("processor", LESSER)
@pytest.mark.parametrize("weight_bits", [None, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_right_and_independent_of_the_batch(processor: str, dtype, weight_bits: int | None) -> None:
    cpp = backend("matmul", 2, *LESSER[processor], weight_bits=weight_bits)
    for out_size, in_size in ((7, 8), (70, 68), (96, 512)):
        plain, x = drawn(out_size, in_size, dtype=dtype), drawn(23, in_size, dtype=dtype)
        weight = cpp.prepare(plain)
        truth = F.linear(x.double(), plain.double())
        found = cpp.logits(x, weight)
        assert (found.double() - truth).norm() < (0.015 if weight_bits else 1e-5) * truth.norm()
        for row in range(23):
            assert torch.equal(cpp.logits(x[row : row + 1], weight)[0], found[row])


@pytest.mark.skipif("amx_int8" not in Machine.probe().cpu_flags, reason="this processor has no matrix unit")
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 32, 33, 270])
@pytest.mark.parametrize("dtype", DTYPES)
def test_8_bits_are_the_same_bits_with_a_matrix_unit_and_without(dtype, rows: int) -> None:
    ours, theirs = (backend("matmul", 2, *flags, weight_bits=8) for flags in ((), NO_MATRIX_UNIT))
    for out_size, in_size in ((7, 5), (70, 67), (96, 288), (64, 1536)):
        plain, x = drawn(out_size, in_size, dtype=dtype), drawn(rows, in_size, dtype=dtype)
        found, expected = (cpp.logits(x, cpp.prepare(plain)) for cpp in (ours, theirs))
        assert torch.equal(found, expected)
        bias = drawn(out_size, dtype=dtype)
        assert torch.equal(ours.linear(x, ours.prepare(plain), bias), theirs.linear(x, theirs.prepare(plain), bias))
