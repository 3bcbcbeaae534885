"""Paged attention against a simple dense reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kernel_cases.attention import CASES, Case, Step, dense, expected, outputs, step
from kernel_comparison import agree
from ops.attention import AttentionMetadata, AttentionOptions, native


def make_case(
    rows: list[tuple[int, int]],
    page_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    seed: int = 0,
) -> Step:
    return step(Case(tuple(rows), page_size, num_heads, num_kv_heads, head_dim), seed)


def check(
    case: Step, *, window: int | None = None, soft_cap: float | None = None, sinks: torch.Tensor | None = None
) -> None:
    options = AttentionOptions(0.3, window, soft_cap=soft_cap, sinks=sinks)
    out = native.attend(*case, options)
    torch.testing.assert_close(out, dense(case, options), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_native_equals_the_dense_reference_in_every_case(name) -> None:
    agree(outputs(native, CASES[name]), expected(CASES[name]))


@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20) | st.just(1)), min_size=1, max_size=8),
    page_size=st.sampled_from([1, 4, 16]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (3, 3)]),
    window=st.none() | st.integers(1, 50),
    soft_cap=st.none() | st.just(1.5),
    has_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=120)
def test_random_batches_equal_the_dense_reference(rows, page_size, heads, window, soft_cap, has_sinks, seed) -> None:
    case = make_case(rows, page_size, *heads, head_dim=8, seed=seed)
    sinks = torch.linspace(-2, 2, heads[0]) if has_sinks else None
    check(case, window=window, soft_cap=soft_cap, sinks=sinks)


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 7])
def test_queries_in_several_blocks_equal_the_dense_reference(monkeypatch, window, soft_cap) -> None:
    monkeypatch.setattr(native, "MAX_MASK_ELEMENTS", 1)
    monkeypatch.setattr(native, "MAX_SCORE_ELEMENTS", 1)  # blocks of 16 queries
    check(make_case([(5, 50), (0, 40), (30, 17)], 4, 4, 2, 8), window=window, soft_cap=soft_cap)


def test_single_tokens_in_several_groups_equal_the_dense_reference(monkeypatch) -> None:
    monkeypatch.setattr(native, "MAX_GROUP_BYTES", 1)
    check(make_case([(40, 1), (3, 1), (40, 1), (0, 1)], 4, 4, 2, 8))


def test_rows_may_share_pages() -> None:
    case = make_case([(0, 20), (16, 1), (16, 6)], 8, 4, 2, 8)
    table = case.inputs.page_table.clone()
    table[1:, :2] = table[0, :2]  # all three rows share the first 16 positions
    inputs = AttentionMetadata.build([0, 16, 16], [20, 1, 6], table.numpy(), 8)
    check(case._replace(inputs=inputs))


def test_the_largest_window_changes_nothing() -> None:
    case = make_case([(9, 1), (0, 10), (4, 3)], 4, 2, 2, 8)
    full = native.attend(case.q, case.k_pool, case.v_pool, case.inputs, AttentionOptions(scale=1.0))
    wide = native.attend(case.q, case.k_pool, case.v_pool, case.inputs, AttentionOptions(scale=1.0, window=10))
    torch.testing.assert_close(wide, full)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close_and_keeps_its_dtype(dtype) -> None:
    case = make_case([(30, 1), (3, 1), (0, 20), (10, 9)], 4, 4, 2, 8)
    exact = native.attend(case.q, case.k_pool, case.v_pool, case.inputs, AttentionOptions(scale=0.3))
    q, k_pool, v_pool = (x.to(dtype) for x in case[:3])
    out = native.attend(q, k_pool, v_pool, case.inputs, AttentionOptions(scale=0.3))
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), exact, atol=0.03, rtol=0.03)


class LargestTensor(TorchDispatchMode):
    """Records the size in bytes of the largest tensor that any operation created."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and not func.is_view:
            self.nbytes = max(self.nbytes, out.nbytes)
        return out


@pytest.mark.parametrize("soft_cap", [None, 30.0])
def test_long_chunk_of_a_long_context_takes_little_memory(monkeypatch, soft_cap) -> None:
    bound = 2**20
    monkeypatch.setattr(native, "MAX_MASK_ELEMENTS", bound)
    monkeypatch.setattr(native, "MAX_SCORE_ELEMENTS", bound)
    end, count = 16384, 512
    k_pool, v_pool = torch.randn(2, end // 16, 1, 16, 4)
    table = np.arange(end // 16, dtype=np.int32)[None]
    inputs = AttentionMetadata.build([end - count], [count], table, 16)
    q = torch.randn(count, 4, 4)
    with LargestTensor() as largest:
        native.attend(q, k_pool, v_pool, inputs, AttentionOptions(scale=0.5, soft_cap=soft_cap))
    assert largest.nbytes <= 4 * bound


@given(lengths=st.lists(st.integers(1, 2000), max_size=60), max_pages=st.integers(1, 4000))
def test_groups_hold_every_row_once_within_their_limits(lengths, max_pages) -> None:
    rows = [(length, row) for row, length in enumerate(lengths)]
    groups = native.split_rows(rows, max_pages)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        padded = max(lengths[row] for row in group) * len(group)
        waste = padded - sum(lengths[row] for row in group)
        assert len(group) == 1 or (padded <= max_pages and waste <= native.MAX_PADDING * padded)


def test_rows_of_one_length_are_one_group() -> None:
    assert len(native.split_rows([(10, row) for row in range(20)], max_pages=1000)) == 1


def test_layers_share_what_was_derived_in_the_first() -> None:
    case = make_case([(9, 1), (3, 1)], 4, 2, 2, 8)
    for _ in range(2):
        native.attend(case.q, case.k_pool, case.v_pool, case.inputs, AttentionOptions(scale=1.0))
    assert len(case.inputs.plan_cache) == 1
