"""Normalisation in C++."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpp_kernels import DTYPES, THREADS, backend, drawn
from kernel_cases.norm import CASES, EPS, Case, expected, outputs
from kernel_comparison import agree
from ops.norm import native

TYPED = {
    f"{name}, {dtype}": case._replace(dtype=dtype)
    for name, case in CASES.items()
    if case.dtype != torch.float16
    for dtype in DTYPES
}
ODD = {
    f"{shape}": Case(shape)
    for shape in ((1, 1), (1, 15), (7, 16), (9, 17), (3, 33), (33, 100), (0, 24), (0, 3, 8), (5, 1, 24))
}


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("case", [*TYPED.values(), *ODD.values()], ids=[*TYPED, *ODD])
def test_kernel_follows_the_formula(case: Case, num_threads: int) -> None:
    found = outputs(backend("norm", num_threads), case)
    agree(found, expected(case))
    assert {x.dtype for x in found} == {case.dtype}


def test_sum_is_rounded_before_it_is_normalised() -> None:
    x, residual, weight = (drawn(5, 40, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    wanted = native.add_rms_norm(x.clone(), residual.clone(), weight[0], EPS)
    normed, total = backend("norm").add_rms_norm(x, residual, weight[0], EPS)
    assert torch.equal(total, wanted[1])
    agree([normed], [wanted[0]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_between_other_heads_are_read_where_they_are(dtype: torch.dtype) -> None:
    qkv = drawn(6, 8 * 16, dtype=dtype)
    for heads in qkv.split((4 * 16, 2 * 16, 2 * 16), dim=-1):
        x = heads.unflatten(-1, (-1, 16))
        agree([backend("norm").rms_norm(x, qkv[0, :16], EPS)], [native.rms_norm(x, qkv[0, :16], EPS)])


@pytest.mark.parametrize("shape", [(24,), (3, 24), (2, 3, 4, 8)])
def test_any_number_of_dimensions_and_any_strides_are_read(shape: tuple[int, ...]) -> None:
    weight = drawn(shape[-1])
    for x in (drawn(*shape), drawn(*shape[::-1]).permute(*reversed(range(len(shape))))):
        agree([backend("norm").rms_norm(x, weight, EPS)], [native.rms_norm(x, weight, EPS)])


@pytest.mark.parametrize("changed", ["x", "residual"])
def test_sums_of_any_strides_are_right(changed: str) -> None:
    tensors = {"x": drawn(5, 24), "residual": drawn(5, 24, seed=1)}
    tensors[changed] = tensors[changed].t().contiguous().t()
    wanted = native.add_rms_norm(tensors["x"].clone(), tensors["residual"].clone(), drawn(24), EPS)
    agree(backend("norm").add_rms_norm(tensors["x"], tensors["residual"], drawn(24), EPS), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_head_has_a_weight_of_its_own(dtype: torch.dtype) -> None:
    x, weight = drawn(6, 5 * 24, dtype=dtype).unflatten(1, (5, 24))[:, :3], drawn(3, 24, dtype=dtype)
    found = backend("norm").layer_norm(x, weight, None, EPS)
    lines = [native.layer_norm(x[:, head], weight[head], None, EPS) for head in range(3)]
    agree([found, native.layer_norm(x, weight, None, EPS)], [torch.stack(lines, 1)] * 2)


@pytest.mark.parametrize("size", [1, 24, 1040])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_scaled_and_gated(dtype: torch.dtype, gated: bool, size: int) -> None:
    x, y = (drawn(5, size, dtype=dtype, seed=seed) for seed in range(2))
    gate = drawn(5, 1, dtype=dtype, seed=2) if gated else None
    through = 1.0 if gate is None else gate.double().sigmoid()
    for backend_of in (native, backend("norm", 2)):
        found = backend_of.add(x.clone(), y.clone(), scale=0.3, gate=gate)
        agree([found], [y.double() + x.double() * through * 0.3])


@given(rows=st.integers(1, 40), size=st.integers(1, 70), dtype=st.sampled_from(DTYPES), data=st.data())
@settings(max_examples=40)
def test_row_alone_is_the_row_among_others_on_any_threads(rows, size, dtype, data) -> None:
    x, weight = drawn(rows, size, dtype=dtype), drawn(size, dtype=dtype, seed=1)
    row = data.draw(st.integers(0, rows - 1))
    one, two = (backend("norm", number).rms_norm(x, weight, EPS) for number in THREADS)
    assert torch.equal(one, two)
    assert torch.equal(backend("norm").rms_norm(x[row : row + 1], weight, EPS)[0], one[row])
