"""Greedy tokens are those of transformers, however the work is cut: batched, cached, chunked, retracted."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny_checkpoints
from serve import Engine

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
NUM_NEW = 24
GREEDY = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
PLAIN = {"skip_tokenizer_init": True, "random_seed": 1}
WAYS: dict[str, dict[str, Any]] = {
    "page size 1": {"page_size": 1},
    "page size 16": {"page_size": 16},
    "chunks of 16": {"page_size": 16, "chunked_prefill_size": 16},
    "chunks of 16, page size 1": {"page_size": 1, "chunked_prefill_size": 16},
    "no overlap": {"disable_overlap_schedule": True},
    "no prefix cache": {"disable_radix_cache": True},
    "not mixed": {"enable_mixed_chunk": False, "chunked_prefill_size": 32},
    "longest prefix first": {"schedule_policy": "lpm"},
    "three at a time": {"max_running_requests": 3},
}


@cache
def model_path(family: str) -> str:
    return tiny_checkpoints.cached(family, max_position_embeddings=512, tie_word_embeddings=family == "qwen3")


@cache
def prompts() -> list[list[int]]:
    """Twenty prompts of 1 to 60 tokens, some of which begin alike."""
    draw = random.Random(0)
    fresh = [
        [draw.randrange(3, 128) for _ in range(length)] for length in (1, 2, 5, 16, 17, 33, 48, 60, 9, 31)
    ]
    return fresh + [prompt[: 1 + len(prompt) // 2] + [draw.randrange(3, 128)] * 3 for prompt in fresh]


@cache
def reference(family: str) -> list[list[int]]:
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(model_path(family), dtype=torch.float32)
    return [
        model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_NEW, eos_token_id=None, pad_token_id=0
        )[0, len(prompt) :].tolist()
        for prompt in prompts()
    ]


async def outputs(engine: Engine) -> list[list[int]]:
    answers = await engine.generate(input_ids=prompts(), sampling_params=GREEDY)
    return [answer["output_ids"] for answer in answers]


@pytest.mark.parametrize("family", FAMILIES)
async def test_alone_and_streamed(family: str):
    async with Engine(model_path(family), **PLAIN) as engine:
        for prompt, expected in zip(prompts(), reference(family), strict=True):
            answer = await engine.generate(input_ids=prompt, sampling_params=GREEDY)
            assert answer["output_ids"] == expected
            pieces = [p async for p in engine.stream(input_ids=prompt, sampling_params=GREEDY)]
            assert [token_id for piece in pieces for token_id in piece["output_ids"]] == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
async def test_twenty_at_once(family: str, way: str):
    async with Engine(model_path(family), **PLAIN, **WAYS[way]) as engine:
        assert await outputs(engine) == reference(family)
        assert await outputs(engine) == reference(family)  # now from the cache, where there is one


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("family", FAMILIES)
async def test_retracted(family: str, page_size: int):
    small = {"max_total_tokens": 288, "schedule_conservativeness": 0.0, "page_size": page_size}
    async with Engine(model_path(family), **PLAIN, **small) as engine:
        assert await outputs(engine) == reference(family)
        assert engine.status().num_retracted > 0


async def test_second_time_the_prompt_comes_from_the_cache():
    async with Engine(model_path("llama"), **PLAIN, page_size=1) as engine:
        prompt = prompts()[7]
        for expected in (0, len(prompt) - 1):
            answer = await engine.generate(input_ids=prompt, sampling_params=GREEDY)
            assert answer["meta_info"]["cached_tokens"] == expected


@pytest.mark.parametrize("chunked_prefill_size", [16, 4096])
async def test_four_choices_compute_the_prompt_once(chunked_prefill_size: int):
    options = {"page_size": 16, "chunked_prefill_size": chunked_prefill_size}
    path = tiny_checkpoints.cached("llama", max_position_embeddings=2048)
    async with Engine(path, **PLAIN, **options) as engine:
        prompt = [3 + place % 100 for place in range(1000)]
        answers = await engine.generate(input_ids=prompt, sampling_params={**GREEDY, "n": 4})
        assert sorted(answer["meta_info"]["cached_tokens"] for answer in answers) == [0, 992, 992, 992]
        assert len({tuple(answer["output_ids"]) for answer in answers}) == 1
