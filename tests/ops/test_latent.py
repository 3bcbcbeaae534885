"""Latent attention: in C++ as in torch, absorbed as expanded."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cpp_kernels import DTYPES, LESSER, backend, drawn, launcher
from ops.attention import AttentionMetadata, AttentionOptions, with_cpp
from ops.attention import native as native_attention
from ops.latent import LatentWeights, min_tokens_to_expand, native

NEVER, ALWAYS = None, 1


class Case(NamedTuple):
    """Rows of (tokens cached before, tokens computed), and the sizes of a layer."""

    rows: tuple[tuple[int, int], ...]
    heads: int = 3
    rank: int = 40
    nope_dim: int = 24
    rope_dim: int = 8
    value_dim: int = 36
    page_size: int = 16
    dtype: torch.dtype = torch.float32
    pool_dtype: torch.dtype | None = None


MIXED = Case(((0, 1), (3, 2), (280, 300), (0, 1), (0, 5), (30, 280), (700, 1)))
CASES = {
    "one row": Case(((0, 70),)),
    "a cached prefix": Case(((600, 30),)),
    "mixed rows": MIXED,
    "pages of one": MIXED._replace(page_size=1),
    "sizes of DeepSeek V2": MIXED._replace(heads=2, rank=512, nope_dim=128, rope_dim=64, value_dim=128),
    "values larger than keys": MIXED._replace(nope_dim=8, value_dim=48),
    "bfloat16": MIXED._replace(dtype=torch.bfloat16),
    "8 bits": MIXED._replace(pool_dtype=torch.float8_e4m3fn),
}


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, AttentionMetadata]:
    """q_nope, q_pe, pool, weights of keys and of values, metadata. Pages are in random order."""
    starts, counts = zip(*case.rows, strict=True)
    query = drawn(sum(counts), case.heads, case.nope_dim + case.rope_dim, dtype=case.dtype)
    q_nope, q_pe = query.split((case.nope_dim, case.rope_dim), dim=-1)
    shape = case.heads, case.nope_dim + case.value_dim, case.rank
    weight = (drawn(*shape) * case.rank**-0.5).to(case.dtype)
    keys, values = weight.split((case.nope_dim, case.value_dim), dim=1)
    pages = [-(-(start + count) // case.page_size) for start, count in case.rows]
    order = iter(np.random.default_rng(0).permutation(sum(pages)).tolist())
    table = np.zeros((len(pages), max(pages)), np.int32)
    for row, count in enumerate(pages):
        table[row, :count] = [next(order) for _ in range(count)]
    pool = drawn(sum(pages), 1, case.page_size, case.rank + case.rope_dim).to(case.pool_dtype or case.dtype)
    return q_nope, q_pe, pool, keys, values, AttentionMetadata.build(starts, counts, table, case.page_size)


def computed(latent: Any, attend: Any, case: Case, expand_from: int | None) -> Tensor:
    """What a backend gives, [T, H * V]."""
    q_nope, q_pe, pool, keys, values, metadata = inputs(case)
    prepare = latent.prepare_heads
    weights = LatentWeights(prepare(keys.transpose(1, 2)), prepare(values), case.value_dim, prepare(keys), expand_from)
    options = AttentionOptions((case.nope_dim + case.rope_dim) ** -0.5)
    return latent.attend_latent(q_nope, q_pe, pool, weights, metadata, options, attend)


def by_torch(case: Case, expand_from: int | None) -> Tensor:
    return computed(native, native_attention.attend, case, expand_from)


def by_cpp(case: Case, expand_from: int | None, num_threads: int = 2, *march: str) -> Tensor:
    return computed(*in_cpp(num_threads, *march), case, expand_from)


def in_cpp(num_threads: int, *march: str) -> tuple[Any, Any]:
    """The operations around attention, and attention."""
    return backend("latent", num_threads, *march), with_cpp.make_attend(launcher(num_threads, *march))


def by_hand(case: Case) -> Tensor:
    """Head by head, token by token, in float64, as the paper says it."""
    q_nope, q_pe, pool, keys, values, metadata = inputs(case)
    cached = pool.to(case.dtype).double().flatten(0, 2)  # [slots, R + P]
    results = []
    for row, (start, count) in enumerate(case.rows):
        first = int(metadata.query_starts[row])
        positions = torch.arange(start + count)
        pages = metadata.page_table[row, positions // case.page_size].long()
        seen = cached[pages * case.page_size + positions % case.page_size]
        latent, rotated = seen[:, : case.rank], seen[:, case.rank :]
        for token in range(first, first + count):
            end = start + token - first + 1
            for head in range(case.heads):
                k = torch.cat((latent @ keys[head].double().T, rotated), dim=-1)[:end]
                q = torch.cat((q_nope[token, head], q_pe[token, head])).double()
                shares = (k @ q * (case.nope_dim + case.rope_dim) ** -0.5).softmax(0)
                results.append(shares @ (latent[:end] @ values[head].double().T))
    return torch.stack(results).view(-1, case.heads * case.value_dim)


def agree(found: Tensor, wanted: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == wanted.shape
    assert found.dtype == dtype
    bound = 2e-6 if dtype == torch.float32 else 1e-2
    apart = (found.double() - wanted.double()).norm(dim=1)
    assert (apart < bound * wanted.double().norm(dim=1)).all()


def test_torch_computes_what_the_paper_says() -> None:
    case = Case(((0, 1), (7, 20), (0, 9)), page_size=4)
    for expand_from in (NEVER, 10, ALWAYS):
        agree(by_torch(case, expand_from), by_hand(case), torch.float32)


@pytest.mark.parametrize("expand_from", [NEVER, 2, 6, 290, ALWAYS])
@pytest.mark.parametrize("name", CASES)
def test_all_ways_agree(name: str, expand_from: int | None) -> None:
    case = CASES[name]
    wanted = by_torch(case, NEVER)
    agree(by_torch(case, expand_from), wanted, case.dtype)
    agree(by_cpp(case, expand_from), wanted, case.dtype)


def test_some_heads_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = by_torch(MIXED, 2)
    monkeypatch.setattr(native, "MAX_EXPANDED_ELEMENTS", 2 * 36 * 600 * 2)  # two heads of most rows
    agree(by_torch(MIXED, 2), wanted, torch.float32)


@pytest.mark.parametrize("backend_of", ["torch", "C++"])
def test_rows_are_computed_the_way_that_was_asked_for(backend_of: str) -> None:
    """Absorbing weights of zeros show in rows that are absorbed, expanding ones in those that are expanded."""
    latent, attend = (native, native_attention.attend) if backend_of == "torch" else in_cpp(2)
    q_nope, q_pe, pool, keys, values, metadata = inputs(MIXED)
    prepare = latent.prepare_heads
    absorbing, expanding = prepare(keys.transpose(1, 2)), prepare(keys)

    def result(absorbing: Tensor, expanding: Tensor) -> Tensor:
        weights = LatentWeights(absorbing, prepare(values), MIXED.value_dim, expanding, 280)
        return latent.attend_latent(q_nope, q_pe, pool, weights, metadata, AttentionOptions(0.2), attend)

    counts = torch.tensor([count for _, count in MIXED.rows])
    is_long, sees_others = (
        x.repeat_interleave(counts) for x in (counts >= 280, torch.tensor([start > 0 for start, _ in MIXED.rows]))
    )
    right = result(absorbing, expanding)
    changed = (result(absorbing, prepare(torch.zeros_like(keys))) != right).any(1)
    assert not changed[~is_long].any()
    assert changed[is_long & sees_others].all()
    changed = (result(prepare(torch.zeros_like(keys).transpose(1, 2)), expanding) != right).any(1)
    assert not changed[is_long].any()
    assert changed[~is_long & sees_others].all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_expanded_token_has_the_same_bits_however_its_row_is_cut(dtype: torch.dtype) -> None:
    case = Case(((0, 1300),), heads=2, dtype=dtype)
    whole = by_cpp(case, ALWAYS, num_threads=1)
    assert torch.equal(by_cpp(case, ALWAYS, num_threads=2), whole)
    q_nope, q_pe, pool, keys, values, metadata = inputs(case)
    latent, attend = in_cpp(2)
    prepare = latent.prepare_heads
    weights = LatentWeights(prepare(keys.transpose(1, 2)), prepare(values), case.value_dim, prepare(keys), ALWAYS)
    options = AttentionOptions((case.nope_dim + case.rope_dim) ** -0.5)
    table, borders = metadata.page_table.numpy(), [0, 1, 30, 256, 700, 1300]
    for start, end in pairwise(borders):
        part = AttentionMetadata.build([start], [end - start], table, case.page_size)
        tokens = slice(start, end)
        found = latent.attend_latent(q_nope[tokens], q_pe[tokens], pool, weights, part, options, attend)
        assert torch.equal(found, whole[tokens])


def test_short_rows_keep_their_bits_beside_expanded_ones() -> None:
    found, absorbed = by_cpp(MIXED, 280), by_cpp(MIXED, NEVER)
    first = 0
    for _, count in MIXED.rows:
        same = torch.equal(found[first : first + count], absorbed[first : first + count])
        assert same == (count < 280)
        first += count


@st.composite
def ragged(draw: st.DrawFn) -> Case:
    row = st.tuples(st.integers(0, 600), st.one_of(st.just(1), st.integers(2, 300)))
    return Case(
        rows=tuple(draw(st.lists(row, min_size=1, max_size=5))),
        heads=draw(st.integers(1, 5)),
        rank=draw(st.sampled_from([24, 40, 56])),
        nope_dim=draw(st.sampled_from([6, 16, 24])),
        value_dim=draw(st.sampled_from([10, 16, 40])),
        page_size=draw(st.sampled_from([1, 16, 24, 512])),
    )


@settings(max_examples=40)
@given(ragged(), st.integers(1, 300), st.integers(1, 3))
def test_ragged_batches_agree(case: Case, expand_from: int, num_threads: int) -> None:
    agree(by_cpp(case, expand_from, num_threads), by_torch(case, NEVER), torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("processor", LESSER)
@pytest.mark.parametrize("name", ["mixed rows", "bfloat16", "8 bits"])
def test_agrees_on_lesser_processors(processor: str, name: str) -> None:
    case = CASES[name]
    agree(by_cpp(case, 6, 2, *LESSER[processor]), by_torch(case, NEVER), case.dtype)


@pytest.mark.parametrize(
    ("rank", "nope_dim", "value_dim", "wanted"),
    [(512, 128, 128, 171), (256, 64, 64, 128), (32, 8, 8, 128), (512, 192, 256, 399), (64, 64, 64, None)],
)
def test_what_is_expanded_follows_from_the_sizes(rank: int, nope_dim: int, value_dim: int, wanted: int | None) -> None:
    assert min_tokens_to_expand(rank, nope_dim, value_dim) == wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 5, 300])
def test_a_token_s_latent_vector_and_key_are_joined(dtype: torch.dtype, tokens: int) -> None:
    latent = drawn(tokens, 55, dtype=dtype)
    parts = latent[:, :40], latent[:, -8:]
    assert torch.equal(backend("latent", 2).join(*parts), native.join(*parts))
