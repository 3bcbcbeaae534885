"""Penalties and log-probabilities, against an obvious reference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from cpp_kernels import backend
from ops.sampling import Scores, native

INF = float("inf")


def assert_close(found: torch.Tensor, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found.numpy(), expected, rtol=2e-6, atol=2e-6)


def penalised(x: float, count: int, in_prompt: bool, frequency: float, presence: float, repetition: float) -> float:
    x -= frequency * count
    if count:
        x -= presence
    if count or in_prompt:
        x = x / repetition if x > 0 else x * repetition
    return x


def test_penalties_change_seen_tokens_of_penalised_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "HOST_PIECE", 8)  # a piece for each row
    logits = torch.tensor([[1.0, -1.0, 2.0, 0.5]]).repeat(3, 1)
    counts = torch.tensor([[9, 9, 9, 9], [2, 0, 0, 1], [0, 3, 0, 0]], dtype=torch.int32)
    in_prompt = torch.tensor([[True] * 4, [False, True, False, False], [False, False, True, False]])
    frequency, presence, repetition = torch.tensor([[0.25, -0.5], [0.5, 1.0], [1.5, 2.0]])
    before = logits.clone()
    there, counted = torch.tensor([2, 0]), torch.tensor([1, 2])
    native.penalize(logits, there, counted, counts, in_prompt, frequency, presence, repetition)
    assert torch.equal(logits[1], before[1])
    for q, (row, index) in enumerate([(2, 1), (0, 2)]):
        rates = frequency[q].item(), presence[q].item(), repetition[q].item()
        for v in range(4):
            seen = int(counts[index, v]), bool(in_prompt[index, v])
            assert logits[row, v].item() == pytest.approx(penalised(before[row, v].item(), *seen, *rates))


def test_penalties_leave_forbidden_tokens_forbidden() -> None:
    logits = torch.tensor([[-INF, 1.0]])
    zero, row = torch.zeros(1, dtype=torch.int64), torch.tensor([[5, 0]], dtype=torch.int32)
    some = torch.tensor([2.0])
    native.penalize(logits, zero, zero, row, torch.zeros(1, 2, dtype=torch.bool), -some, -some, some)
    assert logits.tolist() == [[-INF, 1.0]]


@pytest.fixture(params=["native", "C++"])
def score(request: pytest.FixtureRequest) -> Callable[..., Scores]:
    return native.score if request.param == "native" else backend("sampling", 2).score


@pytest.mark.parametrize(("scale", "temperature"), [(1, 1.0), (10, 0.5), (10, 1e-3), (0.01, 2.0)])
def test_scores_are_the_log_softmax(score: Callable[..., Scores], scale: float, temperature: float) -> None:
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(6, 5000, generator=g) * scale
    chosen, requested = torch.randint(5000, (6,), generator=g), torch.randint(5000, (6, 3), generator=g)
    scores = score(logits, torch.full((6,), temperature), chosen, 4, requested)
    x = logits.double().numpy() / np.float64(np.float32(temperature))
    expected = x - x.max(-1, keepdims=True)
    expected -= np.log(np.exp(expected).sum(-1, keepdims=True))
    order = np.argsort(-expected, axis=-1, kind="stable")[:, :4]
    assert_close(scores.chosen, expected[np.arange(6), chosen.numpy()])
    assert_close(scores.requested, np.take_along_axis(expected, requested.numpy(), -1))
    assert_close(scores.top, np.take_along_axis(expected, order, -1))
    assert scores.top_ids.tolist() == order.tolist()


def test_scores_of_a_row_do_not_depend_on_its_neighbours(score: Callable[..., Scores]) -> None:
    g = torch.Generator().manual_seed(4)
    logits = torch.randn(9, 130_001, generator=g) * 3
    chosen, requested = torch.randint(130_001, (9,), generator=g), torch.randint(130_001, (9, 2), generator=g)
    temperature = torch.rand(9, generator=g) + 0.5
    together = score(logits, temperature, chosen, 5, requested)
    for r in range(9):
        row = slice(r, r + 1)
        alone = score(logits[row], temperature[row], chosen[row], 5, requested[row])
        assert all(torch.equal(a, t[row]) for a, t in zip(alone, together))


def test_equal_scores_are_ranked_by_id_and_forbidden_ones_come_last(score: Callable[..., Scores]) -> None:
    logits = torch.tensor([[-INF, 0.0, 1.0, 0.0, 1.0]])
    scores = score(logits, torch.ones(1), torch.tensor([2]), 128, torch.empty((1, 0), dtype=torch.int64))
    assert scores.top_ids.tolist() == [[2, 4, 1, 3, 0]]
    assert scores.top[0, -1] == -INF
    assert scores.requested.shape == (1, 0)


def test_very_unlikely_tokens_keep_their_order(score: Callable[..., Scores]) -> None:
    logits = torch.tensor([[0.0, -200.0, -150.0, -100.0]])
    none = torch.empty((1, 0), dtype=torch.int64)
    scores = score(logits, torch.ones(1), torch.tensor([1]), 4, none)
    assert scores.top_ids.tolist() == [[0, 3, 2, 1]]
    assert scores.top[0].tolist() == pytest.approx([0, -100, -150, -200])
