"""Products with 8-bit weights in torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cpp_kernels import drawn
from kernel_comparison import agree
from ops.matmul import int8

SHAPES = [(1, 1), (7, 5), (33, 65), (64, 128)]  # [O, I]


def wide(weight: torch.Tensor) -> torch.Tensor:
    """Return the quantised weight in float64. The largest magnitude of each output becomes 127 steps."""
    scales = weight.double().abs().amax(1, keepdim=True) / 127
    return (weight.float() / scales.float().clamp_min(1e-30)).round().double() * scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_those_of_the_rounded_weight(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, x, bias = (
        drawn(*shape, dtype=dtype),
        drawn(3, shape[1], dtype=dtype),
        drawn(shape[0], dtype=dtype),
    )
    prepared = int8.prepare(weight, bits=8)
    found = int8.linear(x, prepared, bias)
    agree([found], [F.linear(x.double(), wide(weight), bias.double())], slack=4)
    assert (found.dtype, prepared.shape) == (dtype, weight.shape)
    assert prepared.untyped_storage().nbytes() <= weight.numel() + 3 + 4 * len(weight)


def test_logits_come_in_float32() -> None:
    prepared, x = int8.prepare(drawn(9, 12, dtype=torch.bfloat16), bits=8), drawn(2, 12, dtype=torch.bfloat16)
    assert int8.logits(x, prepared).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_sums_stay_numbers(dtype: torch.dtype) -> None:
    weight, x = torch.full((2, 1024), 0.01, dtype=dtype), torch.full((1, 1024), 8.0, dtype=dtype)
    agree([int8.linear(x, int8.prepare(weight, bits=8))], [F.linear(x.double(), weight.double())], slack=8)


def test_outputs_of_zeros_stay_zeros() -> None:
    weight = drawn(3, 8)
    weight[1] = 0
    assert int8.linear(drawn(2, 8), int8.prepare(weight, bits=8))[:, 1].eq(0).all()


def test_plain_weights_are_multiplied_as_they_are() -> None:
    weight, x = drawn(5, 8), drawn(2, 8)
    assert torch.equal(int8.linear(x, weight), F.linear(x, weight))
    assert torch.equal(int8.logits(x, weight), F.linear(x, weight))
