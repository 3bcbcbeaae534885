"""An engine whose layers are in host memory gives the same tokens.

Only a GPU has such layers. Here the choice of layers is forced on a CPU, where copies into the slots are real, too.
"""

from __future__ import annotations

import pytest

import tiny_checkpoints
from runtime.config.resolve import model
from runtime.config.resolve.plan_builder import Decision
from runtime.errors import PenstockError
from runtime.worker.layer_ring import LayerRing
from runtime.worker.worker import ModelWorker
from serve import Engine

PROMPTS = [[3 + (7 * i + j) % 50 for j in range(5 + 9 * i)] for i in range(6)]
GREEDY = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}


async def tokens(path: str) -> list[list[int]]:
    async with Engine(path, skip_tokenizer_init=True, max_total_tokens=1024) as engine:
        answers = await engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
        return [answer["output_ids"] for answer in answers]


async def test_tokens_are_the_same_and_weights_cannot_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_checkpoints.cached("llama", num_hidden_layers=6)
    expected = await tokens(path)
    copies: list[int] = []
    copy = LayerRing._copy
    monkeypatch.setattr(LayerRing, "_copy", lambda ring, *rest: copies.append(rest[1]) or copy(ring, *rest))
    monkeypatch.setattr(model, "offload_group", lambda *_: Decision(1, "for this test"))
    monkeypatch.setattr(ModelWorker, "_make_cpu_graph", lambda *_: None)  # it holds the addresses of weights
    assert await tokens(path) == expected
    assert copies[:7] == [0, 1, 2, 3, 4, 5, 0]
    async with Engine(path, skip_tokenizer_init=True, max_total_tokens=1024) as engine:
        with pytest.raises(PenstockError, match="cannot be replaced while it runs"):
            await engine.update_weights_from_disk(path)
        assert await engine.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
