"""An engine with an 8-bit KV cache."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import greedy
import tiny_checkpoints
from serve import Engine

PLAIN: dict[str, Any] = {"skip_tokenizer_init": True, "random_seed": 1}


@pytest.fixture(scope="module")
def path() -> str:
    return tiny_checkpoints.cached("llama", max_position_embeddings=512, head_dim=64, dtype="bfloat16")


async def first_tokens(path: str, **options: Any) -> list[int]:
    """Return the first output token of many prompts."""
    prompts = [prompt[: 1 + cut] for prompt in greedy.prompts() for cut in range(0, len(prompt), 7)]
    async with Engine(path, **PLAIN, **options) as engine:
        answers = await engine.generate(
            input_ids=prompts, sampling_params={"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        )
    return [answer["output_ids"][0] for answer in answers]


@pytest.mark.parametrize(("asked", "share"), [("fp8_e5m2", 0.6), ("fp8_e4m3", 0.75)])
async def test_most_tokens_are_those_of_the_exact_cache(path: str, asked: str, share: float):
    exact = await first_tokens(path)
    found = await first_tokens(path, kv_cache_dtype=asked)
    same = sum(one == other for one, other in zip(exact, found, strict=True))
    assert same >= share * len(exact)
    assert same < len(exact)  # the 8-bit cache was really used


async def test_cached_prefixes_and_retractions_change_nothing():
    path = greedy.model_path("llama")  # float32, because in 16 bits sums depend on the batch
    options = {"kv_cache_dtype": "fp8_e5m2", "page_size": 4}
    tight = {"max_total_tokens": 288, "schedule_conservativeness": 0.0, "chunked_prefill_size": 16}

    async def outputs(engine: Engine) -> list[list[int]]:
        answers = await engine.generate(input_ids=greedy.prompts(), sampling_params=greedy.GREEDY)
        return [answer["output_ids"] for answer in answers]

    async with Engine(path, **PLAIN, **options) as engine:
        expected = await outputs(engine)
        assert await outputs(engine) == expected
    async with Engine(path, **PLAIN, **options, **tight) as engine:
        assert await outputs(engine) == expected
        assert engine.status().num_retracted > 0


async def test_twice_as_many_tokens_fit_and_the_start_says_what_memory_is_for(
    path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    memory = {"available": 40 << 20, "total": 80 << 20, "weights": 1 << 20}
    monkeypatch.setattr("runtime.worker.worker.ModelWorker.memory", lambda self: memory)
    totals = []
    for asked in ("auto", "fp8_e5m2"):
        with caplog.at_level(logging.INFO, "penstock.core"):
            async with Engine(path, **PLAIN, kv_cache_dtype=asked, log_level="info") as engine:
                totals.append(engine.status().max_total_tokens)
    assert totals[1] == pytest.approx(2 * totals[0], abs=16)
    tables = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Memory of cpu")]
    assert [line.split()[0] for line in tables[1].split("\n")[1:]] == ["weights", "KV", "free"]
    assert "float8_e5m2: 30% of the 0.0 GiB of free memory" in tables[1]
