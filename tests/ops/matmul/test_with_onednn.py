from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ops.matmul import native, with_onednn

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(1, 1), (7, 5), (33, 65), (96, 64), (257, 192)]  # [O, I]


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def packed(weight: torch.Tensor) -> torch.Tensor:
    if not with_onednn.packs(weight.dtype):
        pytest.skip(f"oneDNN packs no {weight.dtype} on this processor")
    return with_onednn.prepare(weight)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [(1,), (8,), (31,), (2, 3), (0,)])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_products_are_no_further_from_the_truth(dtype, shape, rows, with_bias) -> None:
    weight, bias = drawn(*shape, dtype=dtype), drawn(shape[0], dtype=dtype) if with_bias else None
    x = drawn(*rows, shape[1], dtype=dtype)
    truth = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    ours, plain = with_onednn.linear(x, packed(weight), bias), native.linear(x, weight, bias)
    assert ours.shape == plain.shape
    assert ours.dtype == dtype
    error, allowed = ((out.double() - truth).abs().sum() for out in (ours, plain))
    # bfloat16 rounds the sum once; in float32 the order of summation matters
    slack = 1 if dtype == torch.bfloat16 else 4
    assert error <= slack * allowed + truth.abs().sum() * torch.finfo(dtype).eps / 8


def test_rows_with_gaps_between_them_are_read_right() -> None:
    weight, x = drawn(9, 6), drawn(4, 11)[:, 2:8]
    torch.testing.assert_close(with_onednn.linear(x, packed(weight)), F.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES)
def test_packing_keeps_shape_and_dtype_and_hides_the_layout(dtype) -> None:
    weight = packed(drawn(9, 6, dtype=dtype))
    assert weight.is_mkldnn
    assert weight.shape == (9, 6)
    assert weight.dtype == dtype
    assert weight.nbytes == 9 * 6 * dtype.itemsize


def test_a_weight_that_cannot_be_packed_stays_as_it_is(caplog) -> None:
    weight, x = drawn(4, 3, dtype=torch.float64), drawn(2, 3, dtype=torch.float64)
    with_onednn.packs.cache_clear()
    assert with_onednn.prepare(weight) is with_onednn.prepare(weight) is weight
    assert [record.getMessage()[:38] for record in caplog.records] == ["oneDNN cannot pack weights in torch.fl"]
    torch.testing.assert_close(with_onednn.linear(x, weight), x @ weight.T)


def test_native_prepares_nothing() -> None:
    weight = drawn(4, 3)
    assert native.prepare(weight) is weight
