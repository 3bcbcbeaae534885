"""Attention groups (--enable-dp-attention) generate the tokens of one process, whatever the other groups do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import rank_cases
from draft_heads import TinyHead
from runtime.errors import EngineFailure
from serve import Engine

GROUPS = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
NGRAM_TREE = {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 3}
TIGHT = {**rank_cases.TIGHT, "max_total_tokens": 168}  # of each group: sequences are retracted
FAMILIES = {
    "deepseek_v3": {"moe_dense_tp_size": 1},
    "llama": {},
    "qwen3_moe": {"tp_size": 4, "enable_dp_lm_head": True},
    "qwen3": {"disable_overlap_schedule": True},  # its LM head is tied
    "gpt_oss": {},
    "mixtral": {"enable_dp_lm_head": True},
    "glm4_moe": {},
    "granitemoe": {"load_balance_method": "longest_prefix"},
    "qwen3_next": {},
    "gemma2": {},
}
SOON = ("deepseek_v3",)


@pytest.mark.parametrize(
    "family",
    [family if family in SOON else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES],
)
async def test_groups_give_the_tokens_of_one_process(family: str):
    path, plain = rank_cases.model_path(family), rank_cases.PLAIN
    async with Engine(path, **plain) as engine:
        expected = await rank_cases.outputs(engine)
    async with Engine(path, **plain, **{**GROUPS, **TIGHT, **FAMILIES[family]}) as engine:
        _, found = await asyncio.gather(rank_cases.cancel_some(engine), rank_cases.outputs(engine))
        assert found == expected
        assert await rank_cases.outputs(engine) == expected
        for number in (6, 6, 6):  # one group is idle, and each has its own prefix cache
            answer = await engine.generate(input_ids=rank_cases.prompts()[number], sampling_params=rank_cases.GREEDY)
            assert answer["output_ids"] == expected[number]
        assert answer["meta_info"]["cached_tokens"] > 0
        if family != "qwen3_next":  # whose states limit how many sequences run
            assert engine.status().num_retracted > 0


async def answers(engine: Engine) -> list[Any]:
    """Return tokens and rounded log-probabilities of requests that use what only rank 0 computes."""
    prompts, drawn = rank_cases.prompts(), {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True}
    calls = await asyncio.gather(
        engine.generate(input_ids=prompts, sampling_params=rank_cases.GREEDY, return_logprob=True, logprob_start_len=0),
        engine.generate(
            input_ids=prompts,
            sampling_params={**drawn, "sampling_seed": 7, "frequency_penalty": 0.7, "repetition_penalty": 1.2},
        ),
        engine.generate(input_ids=prompts[6], sampling_params={**drawn, "n": 5, "sampling_seed": 3}),
    )
    return [answer for call in calls for answer in call]


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"enable_dp_lm_head": True, **NGRAM_TREE}, marks=pytest.mark.slow),
        pytest.param({"enable_hierarchical_cache": True, "tp_size": 4}, marks=pytest.mark.slow),
    ],
)
async def test_samples_and_logprobs_of_every_group(more: dict[str, Any]):
    path, plain = rank_cases.model_path("llama"), rank_cases.PLAIN
    async with Engine(path, **plain) as engine:
        expected = await answers(engine)
    async with Engine(path, **plain, **{**GROUPS, **TIGHT, **more}) as engine:
        found = await answers(engine)
        assert (await engine.update_weights_from_disk(path))["success"]
        found += await answers(engine)
    for one, other in zip(expected * 2, found, strict=True):
        assert one["output_ids"] == other["output_ids"]
        for kind in ("input_token_logprobs", "output_token_logprobs"):
            pairs = zip(one["meta_info"].get(kind, ()), other["meta_info"].get(kind, ()), strict=True)
            for (value, token, *_), (near, same, *_) in pairs:
                assert token == same
                assert near == (value if value is None else pytest.approx(value, abs=1e-3))


DRAWN = {"temperature": 1.0, "max_new_tokens": 12, "ignore_eos": True, "sampling_seed": 7}
PENALISED = {**rank_cases.GREEDY, "frequency_penalty": 0.7, "max_new_tokens": 12}


async def drafted_answers(engine: Engine) -> list[Any]:
    """Return the answers to greedy, sampled and penalised requests: all at once, then alone, beside idle groups."""
    prompts, several = rank_cases.prompts(), (rank_cases.GREEDY, DRAWN, PENALISED)
    calls = [engine.generate(input_ids=prompts, sampling_params=params) for params in several]
    together = [answer for call in await asyncio.gather(*calls) for answer in call]
    # Prompts without a cached prefix, because a draft model may have missed pages of retracted requests.
    fresh = [[100 + (11 * i + n) % 25 for i in range(n)] for n in (33, 60)]
    singles = [
        await engine.generate(input_ids=prompt, sampling_params=params) for prompt in fresh for params in several
    ]
    return together + singles


def drafts_of(answers: list[Any]) -> list[tuple[int, int]]:
    """Return the numbers of correct and of proposed drafts of each answer."""
    metas = [answer["meta_info"] for answer in answers]
    return [(meta.get("spec_num_correct_drafts", 0), meta.get("spec_num_proposed_drafts", 0)) for meta in metas]


@pytest.mark.parametrize(
    "more",
    [
        {},
        pytest.param({"tp_size": 4, "speculative_eagle_topk": 3}, marks=pytest.mark.slow),
        pytest.param({"tp_size": 4, "dp_size": 4, "disable_overlap_schedule": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
async def test_each_group_drafts_for_its_own_rows(more: dict[str, Any]):
    """The draft model is the served model, so it guesses all tokens if its group gives it the right inputs."""
    path, plain = rank_cases.model_path("llama"), {**rank_cases.PLAIN, "dtype": "float32"}
    drafts = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": path}
    drafts |= {"speculative_num_steps": 3, "speculative_adaptive": {"enabled": False}}
    async with Engine(path, **plain) as engine:
        expected = await drafted_answers(engine)
    async with Engine(path, **plain, **drafts, **{**GROUPS, **TIGHT, "max_total_tokens": 120, **more}) as engine:
        _, found = await asyncio.gather(rank_cases.cancel_some(engine), drafted_answers(engine))
        assert more or engine.status().num_retracted > 0
        engine.core.check()
    assert [answer["output_ids"] for answer in found] == [answer["output_ids"] for answer in expected]
    counts = drafts_of([*found[:32], *found[48:50], *found[51:53]])  # a drafter applies no penalties
    assert all(correct > 5 and correct >= 0.9 * proposed for correct, proposed in counts[32:])  # in each group
    assert sum(correct for correct, _ in counts) >= 0.8 * sum(proposed for _, proposed in counts) > 100


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("NEXTN deepseek_v3", {"ep_size": 2}),
        ("EAGLE llama", {"tp_size": 4, "speculative_eagle_topk": 2}),
        ("NEXTN qwen3_next", {}),
        pytest.param("NEXTN glm4_moe", {"enable_dp_lm_head": True}, marks=pytest.mark.long),
    ],
    ids=str,
)
async def test_each_group_has_a_head(kind: str, more: dict[str, Any], tmp_path: Path):
    """Each group's head proposes the tokens that it proposes on one rank, so the same drafts are correct.

    Outputs and drafts have the same four tokens only, so many drafts are correct.
    """
    tiny = TinyHead(tmp_path, kind)
    plain = {"random_seed": 1, "dtype": "float32", "log_level": "error"}
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[20, 31, 42, 53]")
    bias = {str(token): 99 for token in json.loads(tokens.read_text())}
    prompts = [[3 + (7 * i + n) % (tiny.vocab_size - 3) for i in range(n)] for n in (5, 9, 17, 33)]

    async def singles(engine: Engine) -> list[Any]:
        params = {"temperature": 0.4, "sampling_seed": 3, "max_new_tokens": 40, "ignore_eos": True, "logit_bias": bias}
        return [await engine.generate(input_ids=prompt, sampling_params=params) for prompt in prompts]

    drafts = {**tiny.options, "speculative_token_map": str(tokens)}
    drafts |= {name: value for name, value in more.items() if name.startswith("speculative")}
    async with Engine(**plain, **drafts) as engine:
        expected = await singles(engine)
    async with Engine(**plain, **{**drafts, **GROUPS, **more}) as engine:
        found = await singles(engine)  # the groups take turns, and one is idle
        together = await engine.generate(input_ids=prompts * 2, sampling_params=rank_cases.GREEDY)
        engine.core.check()
    async with Engine(**{**plain, "model_path": str(tiny.target)}) as engine:
        greedy = await engine.generate(input_ids=prompts * 2, sampling_params=rank_cases.GREEDY)
    assert [answer["output_ids"] for answer in found] == [answer["output_ids"] for answer in expected]
    assert [answer["output_ids"] for answer in together] == [answer["output_ids"] for answer in greedy]
    assert drafts_of(found) == drafts_of(expected)
    assert sum(correct for correct, _ in drafts_of(found)) > 20


async def centred_logits(path: str, **options: Any) -> torch.Tensor:
    """Return the logits of all tokens after greedy tokens, minus their mean, [N, V]."""
    async with Engine(path, **rank_cases.PLAIN, dtype="float32", **options) as engine:
        answers = await engine.generate(
            input_ids=rank_cases.prompts(),
            sampling_params={**rank_cases.GREEDY, "max_new_tokens": 8},
            return_logprob=True,
            token_ids_logprob=list(range(131)),
        )
    steps = [step for answer in answers for step in answer["meta_info"]["output_token_ids_logprobs"]]
    logits = torch.tensor([[value for value, *_ in step] for step in steps], dtype=torch.float64)
    return logits - logits.mean(1, keepdim=True)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.long)])
async def test_logits_of_groups_and_parts_differ_by_rounding_alone(family: str):
    path = rank_cases.model_path(family)
    expected = await centred_logits(path)
    for options in (GROUPS, {"tp_size": 2, "ep_size": 2}) if family in rank_cases.MIXTURES else (GROUPS,):
        assert (await centred_logits(path, **options) - expected).abs().max() < 1e-5


@pytest.mark.slow
async def test_a_killed_rank_ends_all_groups():
    before = psutil.Process().children()  # of earlier tests
    engine = Engine(rank_cases.model_path("llama"), **rank_cases.PLAIN, **GROUPS)
    await engine.start()
    calls = [
        asyncio.ensure_future(engine.generate(input_ids=prompt, sampling_params=rank_cases.LONG))
        for prompt in rank_cases.prompts()[:4]
    ]
    [worker] = [child for child in psutil.Process().children() if child not in before]
    worker.kill()
    for failed in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(failed, EngineFailure)
        assert "Rank 1" in str(failed)
    await engine.aclose()
    assert worker not in psutil.Process().children()
