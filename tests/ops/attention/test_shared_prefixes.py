"""Rows with common first pages: the C++ kernel reads these pages once, without changing any bit of the results."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpp_kernels import LESSER, launcher
from kernel_cases.attention import Step
from ops.attention import AttentionMetadata, AttentionOptions, with_cpp

SCALE = 0.2
BLOCK = 256  # keys per block
Rows = list[tuple[int, int, int, int]]  # (start, count, an earlier row, number of keys in common with it)
SYSTEM_PROMPT: Rows = [(1024 + i, 1, 0, 1024) for i in range(12)]


def shared_and_copied(
    rows: Rows,
    heads: tuple[int, int] = (6, 2),
    head_dim: int = 16,
    dtype: Any = torch.float32,
    page: int = 16,
) -> tuple[Step, Step]:
    """Return the results of the same step with shared pages and with copies of the pages."""
    generator = torch.Generator().manual_seed(len(rows))
    starts, counts = [row[0] for row in rows], [row[1] for row in rows]
    width = max(start + count for start, count, *_ in rows) // page + 1
    own = np.random.default_rng(0).permutation(len(rows) * width).astype(np.int32).reshape(-1, width)
    k_pool, v_pool = torch.randn(2, own.size, heads[1], page, head_dim, generator=generator, dtype=torch.float32).to(
        dtype
    )
    table = own.copy()
    for row, (start, _, earlier, common) in enumerate(rows):
        pages = min(common, start, starts[earlier]) // page
        table[row, :pages] = table[earlier, :pages]
        for pool in (k_pool, v_pool):
            pool[own[row, :pages]] = pool[own[earlier, :pages]]
    q = torch.randn(sum(counts), heads[0], head_dim, generator=generator).to(dtype)
    shared, copied = (AttentionMetadata.build(starts, counts, pages, page) for pages in (table, own))
    return Step(q, k_pool, v_pool, shared), Step(q, k_pool, v_pool, copied)


@st.composite
def sharing_rows(draw: st.DrawFn) -> Rows:
    rows: Rows = []
    for row in range(draw(st.integers(2, 9))):
        start = draw(st.integers(1, 5)) * BLOCK + draw(st.sampled_from([0, 0, 1, 17, 255, -1, -256]))
        count = draw(st.one_of(st.just(1), st.integers(0, 60), st.just(300)))
        earlier = draw(st.integers(0, max(0, row - 1)))
        rows.append((start, count, earlier, draw(st.integers(0, 5)) * BLOCK + draw(st.integers(0, 40))))
    return rows if any(count for _, count, *_ in rows) else [(300, 1, 0, 0)]


@settings(max_examples=60, deadline=None)
@given(
    sharing_rows(),
    st.sampled_from([(1, 1), (4, 4), (3, 1), (6, 2), (8, 1)]),
    st.sampled_from([16, 48]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([1, 16, 24, 64, 512]),
    st.integers(1, 2),
    st.fixed_dictionaries({}, optional={"soft_cap": st.just(2.0), "window": st.just(700), "slopes": st.just(True)}),
    st.sampled_from([0, 5_000, 40_000, 2**22]),
)
def test_pages_in_common_give_the_bits_that_copies_give(
    rows, heads, head_dim, dtype, page, num_threads, options, num_parts
) -> None:
    shared, copied = shared_and_copied(rows, heads, head_dim, dtype, page)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(with_cpp, "NUM_PARTS", num_parts)
        attend = with_cpp.make_attend(launcher(num_threads))
        if options.pop("slopes", False):
            options = {"window": options.get("window"), "slopes": torch.logspace(-9, -3, heads[0], base=2.0)}
        expected = attend(*copied, AttentionOptions(scale=SCALE, **options))
        assert torch.equal(attend(*shared, AttentionOptions(scale=SCALE, **options)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("processor", LESSER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_in_common_give_the_same_bits_on_lesser_processors(processor, dtype) -> None:
    attend = with_cpp.make_attend(launcher(2, *LESSER[processor]))
    shared, copied = shared_and_copied([*SYSTEM_PROMPT, (600, 40, 0, 512)], dtype=dtype)
    assert torch.equal(attend(*shared, AttentionOptions(scale=SCALE)), attend(*copied, AttentionOptions(scale=SCALE)))


def parts_after(step: Step, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Tensor:
    """Return the partial results that the tasks of a step have written; zero elsewhere."""
    parts = torch.zeros(2**18)
    kernels = launcher(2)
    launch = kernels.launch

    def launch_with_our_parts(name: str, dtype: torch.dtype, operands: Any, *rest: Any) -> None:
        operands.parts, operands.num_parts = ctypes.c_void_p(parts.data_ptr()), len(parts)
        launch(name, dtype, operands, *rest)

    monkeypatch.setattr(kernels, "launch", launch_with_our_parts)
    with_cpp.make_attend(kernels)(*step, AttentionOptions(scale=SCALE, **options))
    return parts


def test_rows_wait_for_each_other_only_where_they_share_whole_blocks(monkeypatch) -> None:
    shared, copied = shared_and_copied(SYSTEM_PROMPT)
    assert parts_after(shared, monkeypatch).any()
    assert not parts_after(copied, monkeypatch).any()
    assert not parts_after(shared, monkeypatch, window=4096).any()
    within_a_block, _ = shared_and_copied([(1024, 1, 0, BLOCK - 1)] * 12)
    assert not parts_after(within_a_block, monkeypatch).any()
    before_new_tokens, _ = shared_and_copied([(BLOCK - 1, 1, 0, 0), *[(BLOCK - 1, 1, 0, 255)] * 11])
    assert not parts_after(before_new_tokens, monkeypatch).any()


def test_a_row_that_shares_little_does_not_shorten_what_others_share(monkeypatch) -> None:
    shared, _ = shared_and_copied([(1024, 1, 0, 0), (300, 1, 0, 256), *[(1024, 1, 0, 1024)] * 20])
    taken = int(parts_after(shared, monkeypatch).nonzero().max()) + 1
    assert taken == 4 * 21 * 6 * (16 + 2)  # blocks x rows that share all of them x heads x (sum and mass)
