"""Log-probabilities of prompts, in chunks across sequences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from runtime.batch import PromptLogprobs
from runtime.request import LogprobParams, Logprobs
from runtime.worker.device import CpuDevice
from runtime.worker.logprobs import CHUNK, prompt_arrays, score_prompts
from runtime.worker.step_inputs import Staging

MODEL, VOCAB = 8, 300
HEAD = torch.randn(MODEL, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
HIDDEN = torch.randn(40, MODEL, generator=torch.Generator().manual_seed(1))


class CountingHead:
    """An LM head that records the number of positions of each call."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls.append(len(hidden))
        # Row by row, so that chunks cannot change the logits.
        return torch.stack([h @ HEAD for h in hidden])


def wanted(row: int, offset: int, count: int, **params: object) -> PromptLogprobs:
    targets = np.random.default_rng(row).integers(0, VOCAB, count, dtype=np.int32)
    return PromptLogprobs(row, offset, targets, LogprobParams(start=0, **params))  # type: ignore[arg-type]


def staged(entries: tuple[PromptLogprobs, ...], chunk: int = CHUNK) -> dict[str, torch.Tensor]:
    return Staging(CpuDevice()).copy(prompt_arrays(entries, chunk))


def read(entries: tuple[PromptLogprobs, ...], head: CountingHead, chunk: int) -> list[tuple[int, Logprobs]]:
    scored = score_prompts(HIDDEN, lambda part, _: head(part), entries, staged(entries, chunk))
    return scored.read([tensor.clone() for tensor in scored.tensors()])


ENTRIES = (
    wanted(0, 0, 11, top=3),
    wanted(2, 15, 1),
    wanted(3, 20, 20, token_ids=(5, 299, 0), top=1),
)


@pytest.mark.parametrize("chunk", [1, 5, 11, 31, 32])
def test_chunked_equals_unchunked_and_is_bounded(chunk: int) -> None:
    head = CountingHead()
    assert read(ENTRIES, head, chunk) == read(ENTRIES, CountingHead(), 1000)
    assert max(head.calls) <= chunk
    assert sum(head.calls) == 32


def test_prompt_logprobs_are_the_log_softmax_of_raw_logits() -> None:
    expected = (HIDDEN.double() @ HEAD.double()).log_softmax(-1)
    found = read(ENTRIES, CountingHead(), 7)
    assert [row for row, _ in found] == [0, 2, 3]
    for entry, (_, logprobs) in zip(ENTRIES, found):
        places = range(entry.offset, entry.offset + len(entry.targets))
        assert [token_id for _, token_id in logprobs.chosen] == entry.targets.tolist()
        assert [p for p, _ in logprobs.chosen] == pytest.approx(expected[places, entry.targets].tolist(), rel=1e-4)
        assert len(logprobs.top) == (len(places) if entry.params.top else 0)
        assert len(logprobs.requested) == (len(places) if entry.params.token_ids else 0)
        for place, top in zip(places, logprobs.top):
            best = expected[place].topk(entry.params.top)
            assert [token_id for _, token_id in top or []] == best.indices.tolist()
            assert [p for p, _ in top or []] == pytest.approx(best.values.tolist(), rel=1e-4)
        for place, requested in zip(places, logprobs.requested):
            ids = list(entry.params.token_ids)
            assert [token_id for _, token_id in requested or []] == ids
            assert [p for p, _ in requested or []] == pytest.approx(expected[place, ids].tolist(), rel=1e-4)


def test_more_alternatives_than_the_vocabulary_holds_are_all_of_it() -> None:
    entry = PromptLogprobs(0, 0, np.array([1], np.int32), LogprobParams(start=0, top=100))
    scored = score_prompts(
        torch.zeros(1, 2), lambda hidden, _: torch.tensor([[0.5, 1.0, 2.0]]), (entry,), staged((entry,))
    )
    ((_, logprobs),) = scored.read(scored.tensors())
    assert [token_id for _, token_id in logprobs.top[0] or []] == [2, 1, 0]
