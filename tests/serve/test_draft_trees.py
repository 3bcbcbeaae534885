"""With alternatives to drafts, outputs equal those of plain decoding, and alternatives are taken."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import greedy
import tiny_models
from draft_heads import TinyHead
from runtime.batch import Branches
from runtime.errors import ConfigurationError
from runtime.worker.branches import take_branches
from runtime.worker.host_drafter import HostDrafter
from runtime.worker.model_runner import StepExecutor
from serve import Engine
from serve.demo import demo_path

IDS = "output_ids"
# The launch line of SGLang's documentation.
TREE: dict[str, Any] = {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}
ALWAYS: dict[str, Any] = {"speculative_adaptive": {"enabled": False}}
QUESTION = "<|im_start|>user\nWhat does --page-size do?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
PROMPTS = [QUESTION, "Once upon a time", "a b c d a b c d a b"]
PARAMS: list[dict[str, Any]] = [
    {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True},
    {"temperature": 0.8, "max_new_tokens": 30, "sampling_seed": 3},
    {"temperature": 0, "max_new_tokens": 30, "frequency_penalty": 0.5},
    {"temperature": 0, "max_new_tokens": 30, "regex": "[a-z ,]+"},
    {"temperature": 0, "max_new_tokens": 40, "stop": ["page"]},
]
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "page size 1": {"page_size": 1},
    "page size 4, chunks of 8": {"page_size": 4, "chunked_prefill_size": 8},
    "retracted": {"max_total_tokens": 512, "schedule_conservativeness": 0.0, "page_size": 16},
    "two stages": {"pp_size": 2, "page_size": 4},
}


async def answers(**options: Any) -> list[dict[str, Any]]:
    async with Engine(log_level="error", random_seed=1, **options) as engine:
        calls = [(prompt, params) for prompt in PROMPTS for params in PARAMS]
        alone = [await engine.generate(prompt, sampling_params=params) for prompt, params in calls]
        together = [engine.generate(prompt, sampling_params=params, return_logprob=True) for prompt, params in calls]
        found = [*alone, *await asyncio.gather(*together)]
        engine.core.check()
        return found


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return [answer[IDS] for answer in asyncio.run(answers())]


def count_taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that receives the number of branches that each step takes."""
    counts: list[int] = []
    tell = StepExecutor._tell_taken

    def told(executor: StepExecutor, batch: Any, states: Any) -> None:
        verified = executor._verified
        taken = None if verified is None else verified.taken
        counts.append(0 if taken is None else int((taken >= 0).sum()))
        tell(executor, batch, states)

    monkeypatch.setattr(StepExecutor, "_tell_taken", told)
    return counts


@pytest.mark.parametrize("way", ["default", *(pytest.param(way, marks=pytest.mark.slow) for way in WAYS if WAYS[way])])
async def test_tokens_with_a_tree_are_those_of_plain_decoding(
    way: str, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = count_taken(monkeypatch)
    found = await answers(speculative_algorithm="EAGLE3", **TREE, **ALWAYS, **WAYS[way])
    # A pipeline rounds the states that it sends, so the same pipeline without drafts is the reference.
    expected = [answer[IDS] for answer in await answers(pp_size=2)] if "pp_size" in WAYS[way] else plain
    assert [answer[IDS] for answer in found] == expected
    assert sum(taken) > 5
    for answer in found[len(found) // 2 :]:
        assert [token for _, token, _ in answer["meta_info"]["output_token_logprobs"]] == answer[IDS]


# Random outputs from only three token ids, so that each n-gram has several continuations.
THREE: dict[str, Any] = {
    "temperature": 1,
    "max_new_tokens": 60,
    "sampling_seed": 3,
    "logit_bias": {"275": 99, "85": 99, "16": 99},
}
NGRAM_TREE: dict[str, Any] = {
    "speculative_ngram_max_match_window_size": 2,
    "speculative_ngram_min_bfs_breadth": 3,
    "speculative_ngram_max_bfs_breadth": 3,
    "speculative_num_draft_tokens": 16,
}


@pytest.mark.parametrize("match_type", ["BFS", pytest.param("PROB", marks=pytest.mark.slow)])
async def test_prompt_lookup_proposes_trees(match_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = count_taken(monkeypatch)
    monkeypatch.setitem(globals(), "PROMPTS", PROMPTS[2:])
    monkeypatch.setitem(globals(), "PARAMS", [*PARAMS[:1], THREE, {**THREE, "sampling_seed": 4}])
    tree = {"speculative_algorithm": "NGRAM", "speculative_ngram_match_type": match_type, **NGRAM_TREE}
    found, expected = await answers(**tree, **ALWAYS), await answers()
    assert [answer[IDS] for answer in found] == [answer[IDS] for answer in expected]
    assert sum(taken) > 5


@pytest.mark.parametrize("family", ["gemma3", pytest.param("gpt_oss", marks=pytest.mark.slow)])
async def test_branches_have_windowed_pages(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys before a branch are copied into its page for windowed layers, too."""
    taken = count_taken(monkeypatch)
    options: dict[str, Any] = {
        "page_size": 4, "chunked_prefill_size": 8, "max_total_tokens": 1024, "swa_full_tokens_ratio": 0.6,
        "skip_tokenizer_init": True,
    }  # fmt: skip
    three = {"temperature": 1, "max_new_tokens": 48, "ignore_eos": True, "logit_bias": {"5": 99, "6": 99, "7": 99}}
    params = [{**three, "sampling_seed": seed} for seed in range(6)]
    found = list[list[list[int]]]()
    for tree in ({}, {"speculative_algorithm": "NGRAM", **NGRAM_TREE, **ALWAYS}):
        async with Engine(greedy.model_path(family), log_level="error", random_seed=1, **options, **tree) as engine:
            calls = [
                engine.generate(input_ids=[5, 6, 9 + number], sampling_params=each)
                for number, each in enumerate(params)
            ]
            found.append([answer[IDS] for answer in await asyncio.gather(*calls)])
            engine.core.check()
            assert engine.status().num_used_pages == 0
    assert found[0] == found[1]
    assert sum(taken) > 5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["EAGLE llama", "NEXTN deepseek_v3"])
async def test_tiny_heads_with_trees(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Latent attention and experts are verified in branches, too."""
    tiny, taken = TinyHead(tmp_path, kind), count_taken(monkeypatch)
    found, expected = await answers(**tiny.options, **TREE), await answers(model_path=str(tiny.target))
    assert [answer[IDS] for answer in found] == [answer[IDS] for answer in expected]
    assert taken


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"speculative_algorithm": "NGRAM"}, "--speculative-eagle-topk needs"),
    ],
)
async def test_what_takes_no_tree_is_refused(options: dict[str, Any], sentence: str) -> None:
    draft = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": demo_path()}
    with pytest.raises(ConfigurationError, match=sentence):
        await Engine(log_level="error", **{**draft, "speculative_eagle_topk": 2, **options}).start()


async def test_draft_models_have_no_windows() -> None:
    path = tiny_models.cached("gemma2")
    draft = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": path, "speculative_eagle_topk": 2}
    with pytest.raises(ConfigurationError, match="must not have"):
        await Engine(path, log_level="error", **draft).start()


def test_a_branch_goes_on_where_the_row_is_rejected() -> None:
    """Row 0 has drafts 5 and 6; branches replace its second draft by 7 and 8, or its first by 9."""
    arrays = {
        "draft_owners": torch.tensor([0]),
        "branch_owners": torch.tensor([0, 0]),
        "branch_firsts": torch.tensor([3, 5]),
        "branch_depths": torch.tensor([2, 1]),
        "branch_ids": torch.tensor([[7, 8], [9, -1]]),
    }
    for ids, before, wanted in (
        ([5, 7, 0, 8, 1, 2], 1, (3, 0, 4)),  # 5, 7, 8, then 1
        ([5, 7, 0, 4, 1, 2], 1, (2, 0, 3)),  # 5, 7, then 4
        ([9, 7, 0, 8, 1, 2], 0, (1, 1, 5)),  # 9, then 2
        ([5, 6, 0, 8, 1, 2], 2, (2, -1, 2)),
        ([7, 6, 0, 8, 1, 2], 0, (0, -1, 0)),
    ):
        found = take_branches(torch.tensor(ids), arrays, torch.tensor([before]), torch.tensor([before]))
        assert tuple(int(value) for value in found) == wanted


def test_a_draft_head_gets_all_tokens_of_a_taken_branch() -> None:
    """The row has drafts 5 and 6 at positions 6 and 7; a branch of prompt lookup has 7 and 8 from position 7 on."""
    head: Any = HostDrafter.__new__(HostDrafter)
    head._entries = SimpleNamespace(kept=8, computed=np.array([9]))
    head._ids, head._states = np.zeros((1, 8), np.int32), torch.zeros(1, 8, 1)
    head._head = SimpleNamespace(project=lambda states: 2 * states)
    executor: Any = SimpleNamespace(
        _draft_model=head,
        _verified=SimpleNamespace(taken=torch.tensor([0])),
        _pool=SimpleNamespace(page_size=4),
    )
    batch: Any = SimpleNamespace(
        drafts=SimpleNamespace(branches=Branches(np.array([1]), np.array([0]), np.array([2]))),
        counts=np.array([3, 2]),
        starts=np.array([5, 7]),
        sequence_indices=np.array([0, 0]),
        token_ids=np.array([4, 5, 6, 7, 8], np.int32),
    )
    StepExecutor._tell_taken(executor, batch, torch.arange(5.0)[:, None])
    assert head._ids[0].tolist() == [8, 0, 0, 0, 0, 0, 0, 7]  # the place of position 8 is 8 % 8
    assert head._states[0, :, 0].tolist() == [8, 0, 0, 0, 0, 0, 0, 6]
    assert head._entries.computed.tolist() == [4]
