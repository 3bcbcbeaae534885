"""Sampling against a simple reference, and against itself."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kernel_cases.sampling import OFF, rows
from ops.sampling import SamplingArrays, native

INF = float("inf")


def one(arrays: SamplingArrays, row: int) -> SamplingArrays:
    return SamplingArrays(*(field[row : row + 1] for field in arrays))


def ids_of(logits: list[float] | Tensor, **fields: object) -> int:
    return int(native.choose(torch.as_tensor(logits)[None], rows(1, **fields))[0])


def kept_by(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> list[tuple[int, float]]:
    """Return (id, probability) of the kept tokens, in the order of the inverse distribution function."""
    scaled = (logits - logits.max()) / temperature
    p = np.exp(scaled) / np.exp(scaled).sum()
    order = np.argsort(-logits, kind="stable")[:top_k].tolist()
    head = p[order] / p[order].sum()
    kept, before = [], 0.0
    for token_id, share in zip(order, head):
        if kept and ((top_p < 1 and before >= top_p) or p[token_id] < min_p * p.max()):
            break
        kept.append((token_id, p[token_id]))
        before += share
    if top_k >= len(p) and top_p >= 1:
        kept.sort()
    total = sum(share for _, share in kept)
    return [(token_id, share / total) for token_id, share in kept]


def kept_within_sigmas(logits: list[float], n: float) -> list[int]:
    """Return the ids that top-n-sigma keeps (arXiv 2411.07641, algorithm 1), computed in plain Python."""
    finite = [x for x in logits if x > -INF]
    mean = sum(finite) / len(finite)
    sigma = (sum((x - mean) ** 2 for x in finite) / len(finite)) ** 0.5
    return [index for index, x in enumerate(logits) if x >= max(logits) - n * sigma]


def may_draw(kept: list[tuple[int, float]], ids: np.ndarray, uniform: np.ndarray, slack: float) -> np.ndarray:
    """Whether the interval of each of `ids` [n] is within `slack` of its uniform number [n]."""
    above = dict(zip((token_id for token_id, _ in kept), np.cumsum([share for _, share in kept])))
    share_of = dict(kept)
    ends = np.array([above.get(token_id, -np.inf) for token_id in ids.tolist()])
    begins = ends - np.array([share_of.get(token_id, 0.0) for token_id in ids.tolist()])
    return (begins <= uniform + slack) & (uniform - slack < ends)


def agrees(ids: Tensor, logits: Tensor, arrays: SamplingArrays, slack: float = 2e-6) -> bool:
    """Whether the reference chooses `ids` [n] for one row of logits and n uniform numbers, except for rounding errors.

    The reference may choose any token that it chooses if its limits are changed by `slack`.
    """
    x, uniform = logits.double().numpy(), arrays.uniform.double().numpy()
    row = {name: field[0].item() for name, field in arrays._asdict().items()}
    temperature, top_k, top_p, min_p = (row[name] for name in ("temperature", "top_k", "top_p", "min_p"))
    if row["top_n_sigma"] > 0:
        outside = np.delete(np.arange(len(x)), kept_within_sigmas(x.tolist(), row["top_n_sigma"]))
        x[outside] = -INF
    found = np.zeros(len(ids), bool)
    for a, b in product((-slack, 0, slack), repeat=2):
        near_p = top_p if top_p == 1 else top_p * (1 + a)
        kept = kept_by(x, temperature, int(top_k), near_p, min_p * (1 + b))
        found |= may_draw(kept, ids.numpy(), uniform, slack)
    return bool(found.all())


finite_logits = st.floats(-20, 20, width=32)
params = st.fixed_dictionaries(
    {
        "temperature": st.floats(0.125, 4, width=32),
        "top_k": st.one_of(st.just(OFF), st.integers(1, 30)),
        "top_p": st.one_of(st.just(1.0), st.floats(2**-10, 1, width=32)),
        "min_p": st.one_of(st.just(0.0), st.floats(0, 1, width=32)),
    }
)


@given(st.lists(finite_logits, min_size=1, max_size=20), params)
@settings(max_examples=300)
def test_any_parameters_choose_as_the_reference_does(logits: list[float], fields: dict) -> None:
    x = torch.tensor(logits)
    arrays = rows(33, uniform=(torch.arange(33) + 0.5) / 33, **fields)
    ids, sound = native.choose(x.expand(33, -1), arrays)
    assert sound.all()
    assert agrees(ids, x, arrays)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 7},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"min_p": 0.1, "top_k": 30},
        {"min_p": 0.1, "top_p": 0.99},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 1.5},
    ],
)
def test_an_even_grid_of_uniforms_gives_each_token_its_probability(fields: dict) -> None:
    size, logits = 4096, torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
    grid = (torch.arange(size) + 0.5) / size
    ids, _ = native.choose(logits.expand(size, -1), rows(size, uniform=grid, **fields))
    reference: dict[str, Any] = {"temperature": 1.0, "top_k": OFF, "top_p": 1.0, "min_p": 0.0} | fields
    expected = torch.zeros(40)
    for token_id, share in kept_by(logits.double().numpy(), **reference):
        expected[token_id] = share * size
    # Each token has one interval of uniform numbers, so its count can be wrong only at the interval's two ends.
    assert (ids.bincount(minlength=40) - expected).abs().max() <= 1.01


def mixed_batch(seed: int, vocab_size: int) -> tuple[Tensor, SamplingArrays]:
    """Return rows with every kind of parameters, and logits with many ties."""
    g = torch.Generator().manual_seed(seed)
    count = 24

    def pick(*options: float) -> Tensor:
        return torch.tensor(options)[torch.randint(len(options), (count,), generator=g)]

    spread = pick(0.1, 2, 8)[:, None]
    logits = (torch.randn(count, vocab_size, generator=g) * spread).bfloat16().float()
    arrays = rows(
        count,
        greedy=pick(0, 0, 0, 1),
        temperature=pick(0.25, 1, 1.5),
        top_k=pick(OFF, OFF, 1, 5, 40, vocab_size - 1, vocab_size),
        top_n_sigma=pick(-1, -1, -1, 0.5, 2),
        top_p=pick(1, 1, 0.01, 0.5, 0.95),
        min_p=pick(0, 0, 0.02, 0.5),
        typical_p=pick(1, 1, 1, 0.3, 0.9),
        xtc_probability=pick(0, 0, 0.5, 1),
        uniform=torch.rand(count, generator=g),
    )
    return logits, arrays


@pytest.mark.parametrize("seed", range(30))
def test_a_row_chooses_the_same_alone_and_in_a_batch(seed: int) -> None:
    logits, arrays = mixed_batch(seed, 1501)
    together, _ = native.choose(logits, arrays)
    alone = [native.choose(logits[r : r + 1], one(arrays, r))[0].item() for r in range(len(logits))]
    assert together.tolist() == alone


@pytest.mark.parametrize("seed", range(30))
def test_every_path_chooses_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, arrays = mixed_batch(seed, 1501)
    expected, _ = native.choose(logits, arrays)
    for first_best, max_best, piece in [(1, 5, 1), (2, 2000, 4000), (2000, 1, 10**6)]:
        monkeypatch.setattr(native, "FIRST_BEST", first_best)
        monkeypatch.setattr(native, "MAX_BEST", max_best)
        monkeypatch.setattr(native, "HOST_PIECE", piece)
        assert native.choose(logits, arrays)[0].tolist() == expected.tolist()


def test_large_vocabulary_chooses_as_the_reference_does() -> None:
    logits, arrays = mixed_batch(5, 6000)
    arrays = arrays._replace(typical_p=torch.ones(24), xtc_probability=torch.zeros(24))  # tested separately
    ids, _ = native.choose(logits, arrays)
    for r in (~arrays.greedy).nonzero()[:, 0].tolist():
        assert agrees(ids[r : r + 1], logits[r], one(arrays, r))


def test_logits_are_left_as_they_were() -> None:
    logits, arrays = mixed_batch(3, 300)
    before = logits.clone()
    native.choose(logits, arrays)
    assert torch.equal(logits, before)


def test_greedy_takes_the_first_of_equal_logits() -> None:
    assert ids_of([1.0, 3.0, 3.0, 2.0], greedy=True, temperature=0.0) == 1


def test_equal_logits_are_ranked_by_id() -> None:
    logits = [-0.0] * 300 + [0.0] * 300
    assert [ids_of(logits, top_k=3, uniform=u) for u in (0.0, 0.5, 0.9)] == [0, 1, 2]


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    logits = [1.0, 2.0, 0.5]
    for u in (0.0, 0.3, 0.99):
        assert ids_of(logits, top_k=3, uniform=u) == ids_of(logits, top_k=99, uniform=u) == ids_of(logits, uniform=u)


@pytest.mark.parametrize("fields", [{"top_p": 1e-7}, {"min_p": 1.0}, {"temperature": 1e-5}, {"top_k": 1}])
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_the_best_token_is_always_kept(fields: dict, uniform: float) -> None:
    assert ids_of([0.5, 0.2, 0.51, 0.1], uniform=uniform, **fields) == 2


def test_min_p_of_one_keeps_all_that_equal_the_best() -> None:
    assert [ids_of([2.0, 1.0, 2.0], min_p=1.0, uniform=u) for u in (0.0, 0.49, 0.51, 0.99)] == [0, 0, 2, 2]


@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.999}, {"min_p": 1e-6}, {"greedy": True}])
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24, 1.0])
def test_a_forbidden_token_is_never_chosen(fields: dict, uniform: float) -> None:
    logits = torch.full((500,), -INF)
    logits[137] = -3.0
    assert ids_of(logits, uniform=uniform, **fields) == 137


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_a_token_next_to_impossible_is_not_chosen_by_a_round_number(uniform: float) -> None:
    logits = [-40.0, 0.0, -40.0, 0.0, -40.0]
    assert ids_of(logits, uniform=uniform) == (1 if uniform == 0 else 3)


@pytest.mark.parametrize("vocab_size", [1, 2])
def test_the_smallest_vocabularies_work(vocab_size: int) -> None:
    for fields in ({}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.5}, {"greedy": True}):
        assert ids_of([1.0, -100.0][:vocab_size], uniform=0.99, **fields) == 0


def test_uniform_near_one_stays_among_a_large_vocabulary() -> None:
    logits = torch.zeros(150_000)
    logits[-5:] = -INF
    assert ids_of(logits, uniform=1.0) == 149_994
    assert ids_of(logits, uniform=0.0) == 0


@pytest.mark.parametrize("bad", ["nan", "one nan", "minus infinity", "infinity"])
def test_an_unsound_row_is_reported_and_harms_no_neighbour(bad: str) -> None:
    logits, arrays = mixed_batch(7, 900)
    expected, sound = native.choose(logits, arrays)
    assert sound.all()
    broken = list(range(0, len(logits), 3))
    ruined = logits.clone()
    if bad == "one nan":
        ruined[broken, 17] = float("nan")
    else:
        ruined[broken] = {"nan": float("nan"), "minus infinity": -INF, "infinity": INF}[bad]
    ids, sound = native.choose(ruined, arrays)
    assert (~sound).nonzero()[:, 0].tolist() == broken
    assert torch.equal(ids[sound], expected[sound])
    assert ids[broken].eq(0).all()


@pytest.mark.parametrize("count", [1, 10, 500])
def test_best_is_a_stable_descending_sort(count: int) -> None:
    g = torch.Generator().manual_seed(2)
    logits = torch.randint(-3, 3, (4, 500), generator=g).float()
    logits[0, 5] = -INF
    logits[2:] = torch.randn((2, 500), generator=g)  # no equal logits, then few
    logits[3] = (logits[3] * 20).round()
    values, ids = native.best(logits, count)
    expected = logits.sort(stable=True, dim=-1, descending=True)
    assert torch.equal(values, expected.values[:, :count])
    assert torch.equal(ids, expected.indices[:, :count])


@given(
    st.lists(st.one_of(finite_logits, st.just(-INF)), min_size=1, max_size=30).filter(lambda x: max(x) > -INF),
    st.floats(2**-7, 5, width=32),
)
@settings(max_examples=200)
def test_top_n_sigma_keeps_the_tokens_of_the_formula(logits: list[float], n: float) -> None:
    uniform = (torch.arange(499) + 0.5) / 499
    fields = {"temperature": 1e3, "uniform": uniform}  # so high that every kept token is drawn
    ids, sound = native.choose(torch.tensor(logits).expand(499, -1), rows(499, top_n_sigma=n, **fields))
    assert sound.all()
    found = ids.unique().tolist()
    # A logit at the threshold, up to rounding, may be on either side.
    assert set(kept_within_sigmas(logits, n * (1 - 1e-6))) <= set(found)
    assert set(found) <= set(kept_within_sigmas(logits, n * (1 + 1e-6)))


def test_top_n_sigma_does_not_depend_on_temperature_or_on_the_unit_of_logits() -> None:
    logits = torch.randn(500, generator=torch.Generator().manual_seed(9))
    kept = kept_within_sigmas(logits.tolist(), 1.0)
    assert 1 < len(kept) < 50
    for factor, temperature in ((1, 1.0), (1e-4, 1.0), (1e4, 1e3), (1, 100.0)):
        fields = {"temperature": temperature, "uniform": torch.rand(2000)}
        ids, _ = native.choose(logits.expand(2000, -1) * factor, rows(2000, top_n_sigma=1.0, **fields))
        assert set(ids.tolist()) <= set(kept)


def test_top_p_counts_the_mass_that_top_n_sigma_keeps() -> None:
    logits = [3.0, 2.9, *[0.0] * 200]  # the tail has most of the mass
    assert ids_of(logits, top_p=0.6, uniform=0.999) > 1
    assert [ids_of(logits, top_n_sigma=1.0, top_p=0.6, uniform=u) for u in (0.1, 0.999)] == [0, 1]
    assert ids_of(logits, top_n_sigma=1.0, top_p=0.5, uniform=0.999) == 0


def test_logits_of_rows_with_top_n_sigma_are_left_as_they_were() -> None:
    x = torch.randn(3, 40)
    before = x.clone()
    native.choose(x, rows(3, top_n_sigma=[1.0, -1.0, 0.5]))
    assert torch.equal(x, before)


def typical_of(logits: list[float], temperature: float, share: float) -> list[int]:
    """Return the ids that typical sampling keeps (arXiv 2202.00666), computed in plain Python."""
    weights = [np.exp((x - max(logits)) / temperature) for x in logits]
    p = [w / sum(weights) for w in weights]
    entropy = -sum(x * np.log(x) for x in p if x)
    ranked = sorted(range(len(p)), key=lambda i: (abs(-np.log(p[i]) - entropy) if p[i] else np.inf, i))
    before = np.cumsum([0, *(p[i] for i in ranked)])
    return sorted(i for i, mass in zip(ranked, before) if mass < share)


def ids_drawn(logits: list[float], **fields: Any) -> list[int]:
    grid = (torch.arange(2000) + 0.5) / 2000
    ids, sound = native.choose(torch.tensor(logits).expand(2000, -1), rows(2000, uniform=grid, **fields))
    assert sound.all()
    return ids.unique().tolist()


def test_typical_p_keeps_the_tokens_of_the_formula() -> None:
    generator = np.random.default_rng(5)
    for share in (0.05, 0.2, 0.5, 0.9):
        for temperature in (0.7, 2.0):
            logits = generator.normal(size=12).round(3).tolist()
            kept = typical_of(logits, temperature, share)
            assert ids_drawn(logits, temperature=temperature, typical_p=share) == kept
    # Of one near-certain token and many alike, the typical ones are not the likeliest.
    assert 0 not in ids_drawn([2.0, *[0.0] * 30], typical_p=0.1)
    assert ids_drawn([9.0, 0.0, -INF], typical_p=0.5, greedy=True) == [0]


def test_xtc_drops_the_likely_tokens_but_the_least_likely_of_them() -> None:
    logits = np.log([0.4, 0.3, 0.15, 0.1, 0.05]).tolist()
    assert ids_drawn(logits, xtc_probability=1.0, xtc_threshold=0.12) == [2, 3, 4]
    assert ids_drawn(logits, xtc_probability=1.0, xtc_threshold=0.12, top_k=3) == [2]
    assert ids_drawn(logits, xtc_probability=1.0, xtc_threshold=0.35) == [0, 1, 2, 3, 4], "one likely token stays"
    assert ids_drawn(logits, xtc_probability=1.0, xtc_threshold=0.12, greedy=True) == [0]
    count = 20000
    grid = rows(count, uniform=torch.rand(count), xtc_probability=0.25, xtc_threshold=0.12)
    ids, _ = native.choose(torch.tensor(logits).expand(count, -1), grid)
    shares = ids.bincount(minlength=5) / count
    expected = 0.75 * torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]) + 0.25 * torch.tensor([0, 0, 0.5, 1 / 3, 1 / 6])
    assert (shares - expected).abs().max() < 0.02, "the decision and the draw are independent"
