"""Sliding-window layers with a separate pool of any size generate the tokens of transformers."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from greedy import GREEDY, model_path, prompts, reference
from runtime.actors.scrape import exposition
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from serve import Engine

SMALL = {"page_size": 4, "chunked_prefill_size": 8, "max_running_requests": 6}
FEW = {"swa_full_tokens_ratio": 0.02}


RETRACTING = {**FEW, "schedule_conservativeness": 0.0}


@pytest.mark.parametrize(
    ("family", "total", "options"),
    [
        ("gemma3", 2048, FEW),
        pytest.param("gpt_oss", 2048, FEW, marks=pytest.mark.slow),
        ("llama4", 2048, {"hybrid_kvcache_ratio": 1.0}),  # its chunks have 9 of 512 tokens
        ("gemma3", 200, RETRACTING),
        ("gpt_oss", 200, RETRACTING),
        ("mistral", 200, RETRACTING),
    ],
)
async def test_tokens_are_the_same_with_few_windowed_pages(
    family: str, total: int, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.core")
    path = model_path(family)
    async with Engine(
        path, skip_tokenizer_init=True, random_seed=1, max_total_tokens=total, **SMALL, **options
    ) as engine:
        for _ in range(2):  # first without cached prefixes, then with them
            answers = await engine.generate(input_ids=prompts(), sampling_params=GREEDY)
            assert [answer["output_ids"] for answer in answers] == reference(family)
        assert engine.status().num_used_pages == 0
        if total == 200:
            assert engine.status().num_retracted > 0
    found = re.search(r"(\d+) pages, (\d+) for windowed layers", caplog.text)
    assert found is not None
    assert int(found[2]) < int(found[1]) // 2


async def test_the_use_of_the_windowed_pool_is_a_metric() -> None:
    options = {**FEW, "max_total_tokens": 200, "skip_tokenizer_init": True, "enable_metrics": True}
    async with Engine(model_path("mistral"), **SMALL, **options) as engine:
        cache = engine.core.schedulers[0].scheduler
        assert cache.load.window_usage == 0
        stream = engine.core.submit(Request(ids=tuple(prompts()[7]), sampling=SamplingParams(max_new_tokens=40)))
        used = []
        async for _ in stream.chunks():
            used.append(cache.load.window_usage)
        assert 0 < max(used) <= 1
        assert b"sglang:swa_token_usage" in exposition(engine.core)
