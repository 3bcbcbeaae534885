"""A draft model on a late device: in every order of its streams, the tokens equal those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

import late_steps
from fake_device import LateDevice
from ops.recurrence import independent
from runtime.batch import Batch, StepOutput
from runtime.modeling.decoder import Decoder
from runtime.speculative import model_drafts
from runtime.speculative.model_drafts import DRAFT
from runtime.worker.cuda_graph import CudaGraphRunner
from runtime.worker.device_drafter import last_parts

PROMPTS = [([3 + i, 9, 4 + 3 * i, 7, 5 + i][: 1 + i % 5], 3 + 2 * i) for i in range(9)]


@pytest.mark.parametrize("sizes", [pytest.param((), marks=pytest.mark.slow), (4, 8, 24)], ids=["eager", "graphs"])
@pytest.mark.parametrize(
    "draft_model",
    [
        late_steps.other_model,
        pytest.param(late_steps.model, marks=pytest.mark.slow),
    ],
)
def test_drafts_change_no_token(draft_model: Callable[[], Decoder], sizes: tuple[int, ...]) -> None:
    draft = draft_model()
    for seed, depth in enumerate((2, 0)):
        expected = late_steps.outputs(PROMPTS, depth=depth)
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


@pytest.mark.parametrize(
    ("family", "methods"),
    [
        ("qwen3_next", "model"),  # gated delta nets
        pytest.param("qwen3_next", "lookup", marks=pytest.mark.slow),
        pytest.param("granitemoehybrid", "model", marks=pytest.mark.slow),  # Mamba 2
        pytest.param("lfm2", "model", marks=pytest.mark.slow),  # short convolutions
    ],
)
def test_drafts_change_no_token_of_recurrent_layers(family: str, methods: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state to continue from is chosen on the device, and graphs compute the tokens of a row in order."""
    seen, chained = list[Batch](), [0]
    replay = CudaGraphRunner._replay

    def counted(runner: CudaGraphRunner, batch, arrays, **more):
        results = replay(runner, batch, arrays, **more)
        chained[0] += results is not None and any(not independent(each.host["spans"]) for each in batch.kinds.values())
        return results

    monkeypatch.setattr(CudaGraphRunner, "_replay", counted)
    expected = late_steps.outputs(PROMPTS[2:], family=family)
    more: dict[str, Any] = {"draft_model": late_steps.other_model(), "draft_methods": "model"}
    if methods == "lookup":
        more = {"drafts": expected}
    found = late_steps.outputs(
        PROMPTS[2:],
        family=family,
        device=LateDevice(Random(2), haste=0.5),
        depth=2,
        sizes=(4, 8, 24),
        capture_every=1,
        watch=seen.append,
        **more,
    )
    assert found == expected
    assert chained[0] > 5
    unknown = [batch for batch in seen if batch.drafts is not None and batch.unknown_starts is not None]
    assert unknown or methods == "lookup"


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


TREE_PROMPTS = [(prompt, 16) for prompt, _ in PROMPTS[:4]]


def outputs_with_trees(draft: Decoder | None, seen: list[StepOutput], **options: Any) -> list[list[int]]:
    """Return the outputs with trees of `draft`, or of prompt lookup (`drafts`) if it is None.

    `seen` gets the output of each step.
    """
    with pytest.MonkeyPatch.context() as patch:
        finish = late_steps.Steps.finish_oldest

        def finished(steps: late_steps.Steps) -> tuple[Batch, StepOutput]:
            batch, output = finish(steps)
            seen.append(output)
            return batch, output

        patch.setattr(late_steps.Steps, "finish_oldest", finished)
        patch.setattr(model_drafts, "LEAST_RATE", 0.0)  # no pauses, although most drafts are wrong
        methods = "lookup" if draft is None else "model"
        return late_steps.outputs(TREE_PROMPTS, draft_model=draft, draft_methods=methods, topk=6, **options)


@pytest.mark.parametrize("draft_model", [late_steps.near_model, late_steps.head])
def test_trees_are_those_of_the_cpu(draft_model: Callable[[], Decoder]) -> None:
    """In each step, a late device accepts as many drafts, and takes the same branches, as a CPU."""
    plain, on_cpu, late = late_steps.outputs(TREE_PROMPTS), list[StepOutput](), list[StepOutput]()
    assert outputs_with_trees(draft_model(), on_cpu, depth=0, num_pages=200) == plain
    device = LateDevice(Random(0), haste=0.5)
    assert outputs_with_trees(draft_model(), late, depth=0, num_pages=200, device=device) == plain
    assert [step.tokens for step in late] == [step.tokens for step in on_cpu]
    assert [step.taken for step in late] == [step.taken for step in on_cpu]
    assert sum(len(step.taken) for step in late) > 2


@pytest.mark.parametrize("sizes", [(8, 24), pytest.param((), marks=pytest.mark.slow)], ids=["graphs", "eager"])
def test_trees_change_no_token(sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is so small that sequences are retracted."""
    plain, taken, replayed = late_steps.outputs(TREE_PROMPTS), 0, list[bool]()
    replay = CudaGraphRunner._replay

    def noted(runner: CudaGraphRunner, batch: Any, arrays: Any, **more: Any) -> Any:
        results = replay(runner, batch, arrays, **more)
        if results is not None:
            replayed.append(batch.attention.repeated is not None)
        return results

    monkeypatch.setattr(CudaGraphRunner, "_replay", noted)
    for seed, draft in enumerate((late_steps.near_model(), late_steps.head(), None)):
        device, late = LateDevice(Random(seed), haste=0.4 * seed), list[StepOutput]()
        options: dict[str, Any] = {"depth": 2, "device": device, "sizes": sizes, "capture_every": 2}
        options |= {"num_pages": 16 + 8 * seed, "drafts": plain if draft is None else None}
        assert outputs_with_trees(draft, late, **options) == plain
        taken += sum(len(step.taken) for step in late)
    assert taken
    assert sum(replayed) > (5 if sizes else -1)


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


def test_the_last_tokens_of_many_rows_are_stored_in_few_parts() -> None:
    """Each part is several launches, so rows of a few tokens beside a long prompt must not have one each."""
    counts = np.array([1, 9, 1, 4, 1, 6, 5, 1], np.int32)
    parts = last_parts(counts, kept=4)
    assert len(parts) == 1 + 3
    ends = counts.cumsum()
    expected = [place for end, count in zip(ends, counts, strict=True) for place in range(end - min(count, 4), end)]
    assert [place for part in parts for place in range(part.start, part.stop)] == expected
    assert last_parts(counts, kept=9) == [slice(0, 28)]
