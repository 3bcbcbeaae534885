"""Engines with draft heads whose plan is that of a GPU, on a late device: no output differs from plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import draft_matrix
from draft_heads import TinyHead
from late_heads import Proposals, corrected
from pretended_gpu import FEW_GRAPHS, pretended_gpu
from runtime.worker.device_drafter import DeviceDrafter
from serve import Engine

GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
PROMPTS = ["the cat sat on the mat", "a b c d a b c d", "x"]


async def test_an_engine_drafts_with_a_head_in_graphs(tmp_path: Path) -> None:
    head = TinyHead(tmp_path, "EAGLE3 small vocabulary")
    answers: list[Any] = []
    for options in ({"model_path": str(head.target)}, {**head.options, **FEW_GRAPHS}):
        with pretended_gpu() as runners:
            async with Engine(log_level="error", max_total_tokens=512, **options) as engine:
                answers.append(await engine.generate(PROMPTS, sampling_params=GREEDY))
    plain, drafted = answers
    assert [each["output_ids"] for each in drafted] == [each["output_ids"] for each in plain]
    assert all(each["meta_info"]["spec_num_proposed_drafts"] > 10 for each in drafted)
    assert len(runners) == 2


@pytest.fixture
def fresh_answers() -> Iterator[None]:
    """Forget the answers of plain decoding: the pretended GPU draws tokens in another way than a CPU."""
    draft_matrix.plain.cache_clear()
    yield
    draft_matrix.plain.cache_clear()


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("deepseek_v3", "NEXTN"),
        ("qwen2", "NGRAM,EAGLE3"),
        ("qwen3_next", "NEXTN"),
        ("granitemoehybrid", "EAGLE3"),
    ],
)
def test_outputs_are_those_of_plain_decoding(
    family: str, method: str, fresh_answers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked and cached prompts, retractions, grammars, penalties, seeds, stop strings and a LoRA adapter."""
    with pretended_gpu():
        requests, expected = draft_matrix.plain(draft_matrix._model(family, method)[0])
    known = {
        tuple(request["input_ids"]): [*request["input_ids"], *expected[name]] for name, request in requests.items()
    }
    made: list[DeviceDrafter] = []
    create = DeviceDrafter.__init__

    def created(self: DeviceDrafter, *args: Any, **more: Any) -> None:
        create(self, *args, **more)
        made.append(self)

    monkeypatch.setattr(DeviceDrafter, "__init__", created)
    with pretended_gpu() as runners, corrected(Proposals(known)):
        found = draft_matrix.compare(family, method, **FEW_GRAPHS)
    assert found is not None
    assert found.different == []
    assert found.accepted > 100
    assert [drafter.reads_states for drafter in made] == [True]
    assert len(runners) == 2
