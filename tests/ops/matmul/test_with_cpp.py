"""Matrix products in C++, in the weights' dtype and in 8 bits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cpp_kernels import DTYPES, THREADS, backend, drawn, library
from kernel_comparison import agree
from ops.machine import Machine
from ops.matmul import native
from ops.matmul.with_cpp import PackedWeight, PackedWeight8

SHAPES = [(1, 4), (7, 6), (31, 34), (33, 66), (96, 64), (257, 200), (320, 1000)]  # [O, I]
FUSED = "fma" in Machine.probe().cpu_flags
ROWS = [1, 2, 3, 11, 12, 13, 31, 250]


def bias_of(size: int, dtype: torch.dtype) -> torch.Tensor:
    return drawn(size, dtype=dtype, seed=9)


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_no_further_from_the_truth_than_plain_torch(dtype, shape, with_bias, num_threads) -> None:
    cpp, weight = backend("matmul", num_threads), drawn(*shape, dtype=dtype)
    packed, bias = cpp.prepare(weight), bias_of(shape[0], dtype) if with_bias else None
    assert isinstance(packed, PackedWeight)
    for rows in ROWS:
        x = drawn(rows, shape[1], dtype=dtype)
        truth = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        ours, plain = cpp.linear(x, packed, bias), native.linear(x, weight, bias)
        assert (ours.shape, ours.dtype) == (plain.shape, dtype)
        error, allowed = ((out.double() - truth).abs().sum() for out in (ours, plain))
        slack = 1.05 if dtype == torch.bfloat16 else 6  # a sum in order of depth is less exact than a tree
        assert error <= slack * allowed + truth.abs().sum() * torch.finfo(dtype).eps / 4


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_not_rounded(dtype, shape) -> None:
    cpp, weight, x = backend("matmul"), drawn(*shape, dtype=dtype), drawn(5, shape[1], dtype=dtype)
    logits = cpp.logits(x, cpp.prepare(weight))
    agree([logits], [x.double() @ weight.double().T], slack=20)
    assert logits.dtype == torch.float32


@pytest.mark.parametrize("weight_bits", [None, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dimensions_and_any_strides_are_read(dtype, weight_bits) -> None:
    cpp, plain = backend("matmul", weight_bits=weight_bits), drawn(40, 24, dtype=dtype)
    weight, bias = cpp.prepare(plain), bias_of(40, dtype)
    strange = [
        drawn(9, 100, dtype=dtype)[:, 10:34],
        drawn(24, 9, dtype=dtype).t(),
        drawn(2, 3, 24, dtype=dtype),
        drawn(24, dtype=dtype),
        drawn(0, 24, dtype=dtype),
        drawn(24, 5, 2, dtype=dtype).transpose(0, 2),
    ]
    for x in strange:
        flat = x.reshape(-1, 24).clone()
        found = cpp.linear(x, weight, bias)
        assert found.shape == (*x.shape[:-1], 40)
        assert torch.equal(found, cpp.linear(flat, weight, bias).view(found.shape))
        if not weight_bits:
            agree([found], [F.linear(x.float(), plain.float(), bias.float())], slack=4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_of_another_tensor_are_packed_right(dtype) -> None:
    cpp, wide, x = backend("matmul"), drawn(64, 33, dtype=dtype), drawn(3, 64, dtype=dtype)
    assert torch.equal(cpp.linear(x, cpp.prepare(wide.t())), cpp.linear(x, cpp.prepare(wide.t().contiguous())))


@pytest.mark.parametrize("weight_bits", [None, 8])
def test_weights_that_no_kernel_takes_stay_as_they_are(weight_bits) -> None:
    cpp = backend("matmul", weight_bits=weight_bits)
    strange = [drawn(4, 6, dtype=torch.float64)]
    if weight_bits is None:
        strange.append(drawn(4, 3, dtype=torch.bfloat16))  # a size that does not fill lanes
    for weight in strange:
        x = drawn(2, weight.shape[1]).to(weight.dtype)
        assert cpp.prepare(weight) is weight
        assert torch.equal(cpp.linear(x, weight), F.linear(x, weight))
        assert torch.equal(cpp.logits(x, weight), F.linear(x, weight).float())


def test_rows_of_another_size_or_dtype_are_refused() -> None:
    cpp = backend("matmul")
    weight = cpp.prepare(drawn(8, 16))
    for x in (drawn(2, 12), drawn(2, 16, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="cannot be multiplied"):
            cpp.linear(x, weight)


@given(
    rows=st.integers(1, 60),
    out_size=st.integers(1, 100),
    in_quads=st.integers(1, 40),
    dtype=st.sampled_from(DTYPES),
    weight_bits=st.sampled_from([None, 8]),
    data=st.data(),
)
@settings(max_examples=60)
def test_rows_alone_are_the_rows_among_others_on_any_threads(
    rows, out_size, in_quads, dtype, weight_bits, data
) -> None:
    one, two = (backend("matmul", number, weight_bits=weight_bits) for number in THREADS)
    plain, x = drawn(out_size, 4 * in_quads, dtype=dtype), drawn(rows, 4 * in_quads, dtype=dtype)
    weight, bias = one.prepare(plain), bias_of(out_size, dtype)
    first = data.draw(st.integers(0, rows - 1))
    some = slice(first, data.draw(st.integers(first + 1, rows)))
    whole = one.linear(x, weight, bias)
    assert torch.equal(whole, two.linear(x, two.prepare(plain), bias))
    assert torch.equal(one.linear(x[some], weight, bias), whole[some])
    assert torch.equal(one.logits(x[some], weight), two.logits(x, weight)[some])


def inverse(top: torch.Tensor) -> torch.Tensor:
    """Return 127 / top in float32, computed like the kernels."""
    return torch.where(top > 0, torch.full_like(top, 127) / top, 0.0)  # 127 / top is 127 times its reciprocal


def emulated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Compute x @ weight.T by the definition, in float64: one scale per output and one per row."""
    x, weight = x.float(), weight.float()
    top, most = (t.abs().amax(1, keepdim=True) for t in (weight, x))
    steps = x.double() * inverse(most).double()  # not rounded, because the kernel fuses the product with the rounding
    total = steps.round() @ (weight * inverse(top)).round().double().T
    return total * (most / 127).double() * (top / 127).double().T


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 8), (33, 60), (64, 64), (70, 67), (130, 288), (40, 1024)])
@pytest.mark.skipif(not FUSED, reason="without fused multiplication, ties are rounded otherwise")
@pytest.mark.parametrize("dtype", DTYPES)
def test_8_bits_are_what_their_definition_says(dtype, shape, num_threads) -> None:
    cpp, weight = backend("matmul", num_threads, weight_bits=8), drawn(*shape, dtype=dtype)
    packed, bias = cpp.prepare(weight), bias_of(shape[0], dtype)
    assert isinstance(packed, PackedWeight8)
    assert packed.shape == shape
    for rows in (1, 5, 12, 31, 33, 260):
        x = drawn(rows, shape[1], dtype=dtype)
        wanted = emulated(x, weight)
        agree([cpp.logits(x, packed)], [wanted])
        agree([cpp.linear(x, packed, bias)], [wanted + bias.double()])


def test_8_bits_of_zeros_and_of_one_large_number() -> None:
    cpp = backend("matmul", weight_bits=8)
    weight, x = drawn(3, 128), drawn(4, 128)
    weight[1], x[2], x[3, 70] = 0, 0, 1e6
    found = cpp.logits(x, cpp.prepare(weight))
    agree([found / 1e6], [emulated(x, weight) / 1e6])
    assert found[:, 1].eq(0).all()
    assert found[2].eq(0).all()
    agree([cpp.logits(x[:2], cpp.prepare(weight))], [emulated(x[:2], weight)])


@pytest.mark.parametrize("rows", [1, 40])
def test_sums_of_8_bits_reach_their_bounds_and_deeper_weights_keep_theirs(rows: int) -> None:
    cpp = backend("matmul", weight_bits=8)
    deepest = library().max_byte_depth
    ones = torch.ones(2, deepest + 1)
    ones[1] = -1
    found = cpp.logits(ones[:1, :-1].expand(rows, -1), cpp.prepare(ones[:, :-1]))
    agree([found], [torch.tensor([[deepest, -deepest]] * rows).double()])
    assert isinstance(cpp.prepare(ones), PackedWeight)


def test_8_bits_take_half_of_the_memory_and_bring_little_error() -> None:
    weight, x = drawn(256, 512, dtype=torch.bfloat16), drawn(16, 512, dtype=torch.bfloat16)
    cpp = backend("matmul", weight_bits=8)
    packed = cpp.prepare(weight)
    assert packed.untyped_storage().nbytes() == 256 * 512 + 4 * 256
    truth = x.double() @ weight.double().T
    error = (cpp.logits(x, packed).double() - truth).norm() / truth.norm()
    assert 1e-4 < error < 0.015


@pytest.mark.parametrize("strange", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_spoils_its_row_and_no_other_with_eight_bits(strange: float) -> None:
    products = backend("matmul", 1, weight_bits=8)
    weight, x = products.prepare(drawn(64, 128)), drawn(3, 128)
    x[1, 70] = strange
    spoiled = products.linear(x, weight).isnan()
    assert spoiled[1].all()
    assert not spoiled[[0, 2]].any()
