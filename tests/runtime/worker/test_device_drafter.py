"""A draft model on a late device: in every order of its streams, the tokens equal those of plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

import late_steps
from fake_device import LateDevice
from runtime.batch import Batch
from runtime.modeling.decoder import Decoder
from runtime.worker.cuda_graph import CudaGraphRunner

PROMPTS = [([3 + i, 9, 4 + 3 * i, 7, 5 + i][: 1 + i % 5], 3 + 2 * i) for i in range(9)]


@pytest.mark.parametrize("sizes", [(), (4, 8, 24)], ids=["eager", "graphs"])
@pytest.mark.parametrize("draft_model", [late_steps.model, late_steps.other_model, late_steps.head])
def test_drafts_change_no_token(draft_model: Callable[[], Decoder], sizes: tuple[int, ...]) -> None:
    draft = draft_model()
    for depth in (0, 1, 2):
        expected = late_steps.outputs(PROMPTS, depth=depth)
        for seed in range(3):
            device, seen = LateDevice(Random(seed), haste=0.3 * seed), list[Batch]()
            found = late_steps.outputs(
                PROMPTS, device=device, depth=depth, sizes=sizes, capture_every=2, draft_model=draft, watch=seen.append
            )
            assert found == expected
            assert any(batch.drafts is not None for batch in seen)
            if depth:
                assert any(batch.drafts is not None and batch.unknown_starts is not None for batch in seen)


def test_a_model_that_agrees_takes_fewer_steps_and_graphs_compute_them(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed, greedy = [0], ({"temperature": 0.0},)
    replay = CudaGraphRunner._replay

    def counted(runner: CudaGraphRunner, batch, arrays):
        results = replay(runner, batch, arrays)
        replayed[0] += results is not None and batch.token_rows is not None
        return results

    monkeypatch.setattr(CudaGraphRunner, "_replay", counted)
    prompts, steps = [([3, 9, 4], 30)], []
    for draft in (None, late_steps.other_model(), late_steps.model()):
        seen = list[Batch]()
        device = LateDevice(Random(1), haste=1)
        late_steps.outputs(
            prompts, device=device, sizes=(8,), capture_every=1, draft_model=draft, ways=greedy, watch=seen.append
        )
        steps.append(len(seen))
    assert steps[2] < steps[0] / 3
    assert replayed[0] > 5
