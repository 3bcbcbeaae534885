"""Activations in C++."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpp_kernels import DTYPES, THREADS, backend, drawn
from kernel_cases.activation import CASES, Case, expected, outputs
from kernel_comparison import agree
from ops.activation import ACTIVATIONS, native

TYPED = {
    f"{name}, {dtype}": case._replace(dtype=dtype)
    for name, case in CASES.items()
    if case.dtype != torch.float16
    for dtype in DTYPES
}
ODD = {
    f"{activation} {shape}": Case(activation, shape)
    for activation in ACTIVATIONS
    for shape in ((1, 2), (3, 34), (0, 8), (1, 2 * 513), (5, 2 * 1030))
}


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("case", [*TYPED.values(), *ODD.values()], ids=[*TYPED, *ODD])
def test_kernel_follows_the_formula(case: Case, num_threads: int) -> None:
    found = outputs(backend("activation", num_threads), case)
    agree(found, expected(case))
    assert {x.dtype for x in found} == {case.dtype}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_and_tiny_numbers_stay_right(activation: str) -> None:
    gates = torch.tensor([0.0, 1e-30, -1e-30, 1e-4, 20, -20, 88, -88, 100, -100, 1e4, -1e4, 1e30, -1e30])
    x = torch.cat((gates, torch.ones_like(gates))).unsqueeze(0)
    agree([backend("activation").gate(x, activation)], [native.gate(x.clone(), activation)])


def test_silu_is_right_to_a_millionth_of_itself() -> None:
    gates = torch.linspace(-80, 80, 100001).unsqueeze(0)
    found = backend("activation").gate(torch.cat((gates, torch.ones_like(gates)), 1), "silu")
    wanted = torch.nn.functional.silu(gates.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_infinity_opens_a_gate(activation: str) -> None:
    x = torch.tensor([[torch.inf, 2.0, 3.0, -1.0]])
    found = backend("activation").gate(x, activation)[0, 0]
    assert found == (torch.inf if activation != "clamped_swiglu" else native.gate(x, activation)[0, 0])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_is_no_number_stays_none(activation: str) -> None:
    x = torch.ones(2, 40)
    x[0, 3] = x[1, 19] = torch.nan
    assert torch.equal(backend("activation").gate(x, activation).isnan(), native.gate(x.clone(), activation).isnan())


def test_columns_of_a_wider_tensor_are_read_right() -> None:
    x = drawn(4, 100)[:, 10:50]
    agree([backend("activation").gate(x, "silu")], [native.gate(x.clone(), "silu")])


@given(
    rows=st.integers(1, 20),
    size=st.integers(1, 600),
    dtype=st.sampled_from(DTYPES),
    activation=st.sampled_from(ACTIVATIONS),
    data=st.data(),
)
@settings(max_examples=40)
def test_row_alone_is_the_row_among_others_on_any_threads(rows, size, dtype, activation, data) -> None:
    x = drawn(rows, 2 * size, dtype=dtype)
    row = data.draw(st.integers(0, rows - 1))
    one, two = (backend("activation", number).gate(x, activation) for number in THREADS)
    assert torch.equal(one, two)
    assert torch.equal(backend("activation").gate(x[row : row + 1], activation)[0], one[row])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [each for each in ACTIVATIONS if each != "clamped_swiglu"])
def test_all_of_x_is_activated(activation: str, dtype: torch.dtype) -> None:
    x = 2 * drawn(7, 33, dtype=dtype)
    found = backend("activation", 2).activate(x, activation)
    gated = native.gate(torch.cat([x, torch.ones_like(x)], dim=-1), activation)
    agree([found, native.activate(x, activation)], [gated, gated])
