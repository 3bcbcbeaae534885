from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpp_kernels import LESSER, launcher
from kernel_cases import attention
from kernel_cases.attention import CASES, Case, Step
from kernel_comparison import agree
from ops.attention import AttentionMetadata, AttentionOptions, native, with_cpp

OWN_POOLS = {name: case for name, case in CASES.items() if case.pool_dtype is None}
OF_BYTES = {name: case for name, case in CASES.items() if case.pool_dtype is not None}
BF16, FP32 = torch.bfloat16, torch.float32
SCALE = 0.2


def backend(num_threads: int = 2, *march: str) -> Any:
    return SimpleNamespace(attend=with_cpp.make_attend(launcher(num_threads, *march)))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", OWN_POOLS)
def test_agrees_with_the_reference(name, dtype) -> None:
    case = OWN_POOLS[name]._replace(dtype=dtype)
    agree(attention.outputs(backend(), case), attention.expected(case))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", OF_BYTES)
def test_reads_a_cache_of_8_bits(name, dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "attend", None)
    case = OF_BYTES[name]._replace(dtype=dtype)
    agree(attention.outputs(backend(), case), attention.expected(case))


@pytest.mark.slow
@pytest.mark.parametrize("processor", LESSER)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_agrees_on_lesser_processors(processor, dtype) -> None:
    lesser = backend(2, *LESSER[processor])
    for name in ("mixed rows", "sinks, window and soft cap", "head dim 80", "pages of one", *OF_BYTES):
        case = CASES[name]._replace(dtype=dtype)
        agree(attention.outputs(lesser, case), attention.expected(case))
    long = Case(((600, 1), (500, 40)), dtype=dtype)
    agree(attention.outputs(lesser, long), attention.outputs(native, long))


@st.composite
def ragged(draw: st.DrawFn) -> Case:
    row = st.tuples(st.integers(0, 700), st.one_of(st.just(1), st.integers(2, 300)))
    kv_heads, soft_cap = draw(st.integers(1, 3)), draw(st.none() | st.just(2.0))
    return Case(
        rows=tuple(draw(st.lists(row, min_size=1, max_size=5))),
        page_size=draw(st.sampled_from([1, 16, 24, 64, 512])),
        num_heads=kv_heads * draw(st.integers(1, 8)),
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([16, 48, 64, 80])),
        window=draw(st.none() | st.integers(1, 600)),
        soft_cap=soft_cap,
        sinks=draw(st.booleans()),
        slopes=soft_cap is None and draw(st.booleans()),
    )


@settings(max_examples=40)
@given(ragged(), st.integers(1, 3))
def test_ragged_batches_agree_with_native(case, num_threads) -> None:
    agree(attention.outputs(backend(num_threads), case), attention.outputs(native, case))


def mean_error(found: Tensor, exact: Tensor) -> float:
    return (found.double() - exact).abs().mean().item()


@pytest.mark.parametrize("strength", [1, 8])
@pytest.mark.parametrize("rows", [((1500, 1),) * 3, ((0, 700),), ((300, 50), (900, 1))])
def test_bfloat16_is_about_as_exact_as_torchs_own_attention(rows, strength) -> None:
    given = attention.step(Case(rows, dtype=BF16, num_heads=6))
    given = given._replace(q=given.q * strength)
    q, k_pool, v_pool = (x.double() for x in given[:3])
    exact = native.attend(q, k_pool, v_pool, given.inputs, AttentionOptions(scale=SCALE))
    ours, theirs = (mean_error(b.attend(*given, AttentionOptions(scale=SCALE)), exact) for b in (backend(), native))
    assert ours < 1.2 * theirs


def rows_of(given: Step, rows: Sequence[tuple[int, int, int]]) -> Step:
    """Return the batch of (row, start, count) over the same cache. Queries are those of the row's positions."""
    firsts = np.cumsum([0, *given.inputs.counts_host])
    places = [firsts[row] + start - given.inputs.starts_host[row] + np.arange(count) for row, start, count in rows]
    table = given.inputs.page_table.numpy()[[row for row, _, _ in rows]]
    starts, counts = [start for _, start, _ in rows], [count for _, _, count in rows]
    inputs = AttentionMetadata.build(starts, counts, table, given.inputs.page_size)
    return given._replace(q=given.q[torch.from_numpy(np.concatenate(places))], inputs=inputs)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("dtype", "head_dim"), [(FP32, 16), (BF16, 16), (BF16, 48), (BF16, 64)])
def test_a_token_has_the_same_bits_alone_batched_and_chunked(dtype, head_dim, window) -> None:
    whole = attention.step(Case(((0, 800), (0, 530)), dtype=dtype, num_heads=6, head_dim=head_dim))
    attend = backend(2).attend
    expected = attend(*whole, AttentionOptions(scale=SCALE, window=window))
    chunks = [(0, 0, 33), (0, 33, 512), (0, 545, 255), (1, 0, 1), (1, 1, 529)]
    assert torch.equal(attend(*rows_of(whole, chunks), AttentionOptions(scale=SCALE, window=window)), expected)
    for position in (0, 255, 256, 257, 511, 799):
        alone = attend(*rows_of(whole, [(0, position, 1)]), AttentionOptions(scale=SCALE, window=window))
        assert torch.equal(alone[0], expected[position])
    batched = attend(
        *rows_of(whole, [(1, p, 1) for p in range(300, 530)]), AttentionOptions(scale=SCALE, window=window)
    )
    assert torch.equal(batched, expected[800 + 300 :])


@pytest.mark.parametrize("rows", [((3000, 1),), ((0, 700),), ((900, 1), (0, 300), (600, 20))])
def test_a_result_has_the_same_bits_on_any_number_of_threads(rows, monkeypatch) -> None:
    given = attention.step(Case(rows, dtype=BF16))
    expected = backend(1).attend(*given, AttentionOptions(scale=SCALE))
    for num_threads in (2, 3, 7):
        assert torch.equal(backend(num_threads).attend(*given, AttentionOptions(scale=SCALE)), expected)
    monkeypatch.setattr(with_cpp, "NUM_PARTS", 0)  # no memory to divide keys
    assert torch.equal(backend(3).attend(*given, AttentionOptions(scale=SCALE)), expected)


def test_queries_may_stand_in_a_wider_tensor() -> None:
    case = Case(dtype=BF16)
    given = attention.step(case)
    wide = torch.randn(len(given.q), case.num_heads + 4, case.head_dim).to(BF16)
    wide[:, : case.num_heads] = given.q
    sliced = given._replace(q=wide[:, : case.num_heads])
    agree([backend().attend(*sliced, AttentionOptions(scale=SCALE))], attention.expected(case))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_value_that_is_no_number_reaches_only_those_who_read_it(dtype) -> None:
    given = attention.step(Case(((9, 1), (0, 300)), dtype=dtype))
    page = int(given.inputs.page_table[1, 18])  # holds positions 288 to 303
    for pool in (given.k_pool, given.v_pool):
        spoiled = [pool.clone() if pool is other else other for other in (given.k_pool, given.v_pool)]
        spoiled[0 if pool is given.k_pool else 1][page, 0, 11:] = torch.nan  # the last head
        lost = backend().attend(given.q, *spoiled, given.inputs, AttentionOptions(scale=SCALE)).isnan().all(-1)
        assert lost[300, :2].all()  # both heads of kv head 0, at the last position
        assert not lost[:, 2:].any()
        assert not lost[0].any()


@pytest.mark.parametrize("case", [Case(head_dim=24), Case(dtype=torch.float16), CASES["fp8 e5m2 with scales"]])
def test_what_the_kernel_does_not_compute_goes_to_native(case) -> None:
    found, wanted = (attention.outputs(b, case)[0] for b in (backend(), native))
    assert torch.equal(found, wanted)


def test_rows_without_new_tokens_are_passed_over() -> None:
    inputs = AttentionMetadata.build([5, 3, 7], [1, 0, 1], np.arange(3, dtype=np.int32)[:, None], 16)
    k_pool, v_pool = torch.randn(2, 3, 2, 16, 16)
    q = torch.randn(2, 4, 16)
    found = backend().attend(q, k_pool, v_pool, inputs, AttentionOptions(scale=SCALE))
    only = AttentionMetadata.build([5, 7], [1, 1], np.array([[0], [2]], np.int32), 16)
    agree([found], [native.attend(q, k_pool, v_pool, only, AttentionOptions(scale=SCALE))])
