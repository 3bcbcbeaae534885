"""Greedy tokens equal those of transformers for batches, cached prefixes, chunks and retractions."""

from __future__ import annotations

from typing import Any

import pytest

import tiny_checkpoints
from greedy import FAMILIES, GREEDY, model_path, prompts, reference
from serve import Engine

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


async def outputs(engine: Engine) -> list[list[int]]:
    answers = await engine.generate(input_ids=prompts(), sampling_params=GREEDY)
    return [answer["output_ids"] for answer in answers]


@pytest.mark.parametrize("family", FAMILIES)
async def test_alone_or_streamed(family: str):
    async with Engine(model_path(family), **PLAIN) as engine:
        for number, (prompt, expected) in enumerate(zip(prompts(), reference(family), strict=True)):
            if number % 2:
                found = (await engine.generate(input_ids=prompt, sampling_params=GREEDY))["output_ids"]
            else:
                pieces = [p async for p in engine.stream(input_ids=prompt, sampling_params=GREEDY)]
                found = [token_id for piece in pieces for token_id in piece["output_ids"]]
            assert found == expected


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
async def test_twenty_at_once(family: str, way: str):
    async with Engine(model_path(family), **PLAIN, **WAYS[way]) as engine:
        assert await outputs(engine) == reference(family)
        assert await outputs(engine) == reference(family)  # now with cached prefixes, if the cache is enabled


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
