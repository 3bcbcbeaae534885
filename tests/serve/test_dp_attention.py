"""Attention groups (--enable-dp-attention) generate the tokens of one process, whatever the other groups do."""

from __future__ import annotations

import asyncio
from typing import Any

import psutil
import pytest
import torch

import rank_cases
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
