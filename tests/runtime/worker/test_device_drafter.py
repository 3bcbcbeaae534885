"""A draft model on a late device: in every order of its streams, the tokens equal those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

import late_steps
from fake_device import LateDevice
from runtime.batch import Batch
from runtime.modeling.decoder import Decoder
from runtime.speculative.model_drafts import DRAFT
from runtime.worker.cuda_graph import CudaGraphRunner

PROMPTS = [([3 + i, 9, 4 + 3 * i, 7, 5 + i][: 1 + i % 5], 3 + 2 * i) for i in range(9)]


@pytest.mark.parametrize("sizes", [pytest.param((), marks=pytest.mark.slow), (4, 8, 24)], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    "draft_model",
    [
        late_steps.other_model,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (late_steps.model, late_steps.head)),
    ],
)
def test_drafts_change_no_token(draft_model: Callable[[], Decoder], sizes: tuple[int, ...]) -> None:
    draft = draft_model()
    for depth in (0, 2):
        expected = late_steps.outputs(PROMPTS, depth=depth)
        for seed in range(2):
            device, seen = LateDevice(Random(seed), haste=0.5 * seed), list[Batch]()
            found = late_steps.outputs(
                PROMPTS,
                device=device,
                depth=depth,
                sizes=sizes,
                capture_every=2,
                draft_model=draft,
                draft_methods="model",
                watch=seen.append,
            )
            assert found == expected
            assert any(batch.drafts is not None for batch in seen)
            if depth:
                assert any(batch.drafts is not None and batch.unknown_starts is not None for batch in seen)


@pytest.mark.slow
@pytest.mark.parametrize("methods", ["model", "both"])
@pytest.mark.parametrize("num_host_pages", [0, 8])
def test_drafts_change_no_token_in_a_small_pool(num_host_pages: int, methods: str) -> None:
    """Sequences are retracted. With host pages, their pages are moved to the host and back."""
    prompts = [(prompt, 6 + num_new) for prompt, num_new in PROMPTS]
    expected, by_model = late_steps.outputs(prompts), set[bool]()

    def watch(batch: Batch) -> None:
        if batch.drafts is not None:
            firsts = batch.counts.cumsum() - batch.counts
            by_model.update((batch.token_ids[firsts[batch.drafts.rows] + 1] == DRAFT).tolist())

    for seed in range(3):
        found = late_steps.outputs(
            prompts,
            device=LateDevice(Random(seed), haste=0.3 * seed),
            depth=1 + seed % 2,
            num_pages=16,
            sizes=(4, 8, 24),
            capture_every=2,
            num_host_pages=num_host_pages,
            swap=num_host_pages > 0,
            draft_model=late_steps.model(),
            draft_methods=methods,
            watch=watch,
        )
        assert found == expected
    assert by_model == ({True} if methods == "model" else {True, False})


def test_a_model_that_agrees_takes_fewer_steps_and_graphs_compute_them(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed, greedy = [0], ({"temperature": 0.0},)
    replay = CudaGraphRunner._replay

    def counted(runner: CudaGraphRunner, batch, arrays, **more):
        results = replay(runner, batch, arrays, **more)
        replayed[0] += results is not None and batch.token_rows is not None
        return results

    monkeypatch.setattr(CudaGraphRunner, "_replay", counted)
    prompts, steps = [([3, 9, 4], 30)], []
    for draft in (None, late_steps.other_model(), late_steps.model()):
        seen = list[Batch]()
        device = LateDevice(Random(1), haste=1)
        late_steps.outputs(
            prompts,
            device=device,
            sizes=(8,),
            capture_every=1,
            draft_model=draft,
            draft_methods="model" if draft else "lookup",
            ways=greedy,
            watch=seen.append,
        )
        steps.append(len(seen))
    assert steps[2] < steps[0] / 3
    assert replayed[0] > 5
