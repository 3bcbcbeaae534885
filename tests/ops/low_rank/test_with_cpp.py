"""Low-rank additions in C++."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpp_kernels import THREADS, backend
from kernel_cases.low_rank import CASES, Case, expected, inputs, outputs
from kernel_comparison import agree
from ops.low_rank import LowRank

SUPPORTED = {
    **{name: case for name, case in CASES.items() if case.dtype != torch.float16},
    "bfloat16 added to float32": Case((1, 4, 0), sizes=(64, 32), dtype=torch.bfloat16, out_dtype=torch.float32),
}


@pytest.mark.parametrize("num_threads", THREADS)
@pytest.mark.parametrize("case", [*SUPPORTED.values()], ids=[*SUPPORTED])
def test_each_token_gets_the_product_of_its_slot(case: Case, num_threads: int) -> None:
    agree(outputs(backend("low_rank", num_threads), case), expected(case))


@given(st.lists(st.integers(0, 3), max_size=70), st.integers(1, 40), st.lists(st.integers(1, 80), min_size=1))
@settings(max_examples=40, deadline=None)
def test_any_tokens_and_sizes(slots: list[int], size: int, sizes: list[int]) -> None:
    case = Case(tuple(slots), ranks=(5, 0, 9), rank=9, size=size, sizes=tuple(sizes[:4]))
    agree(outputs(backend("low_rank", 2), case), expected(case))


def test_a_token_has_the_same_result_alone_and_beside_others() -> None:
    case = CASES["many tokens of one slot"]
    y, x, weights, slots = inputs(case)
    add = backend("low_rank", 2).add_low_rank
    together = add(y.clone(), x, weights, slots)
    for token in (0, 31, 32, 76, 100, 117):
        one = slice(token, token + 1)
        assert torch.equal(add(y[one].clone(), x[one], LowRank(*weights), slots[one]), together[one])
