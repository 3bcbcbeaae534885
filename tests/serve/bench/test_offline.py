"""Any amount of work that is submitted at once to the benchmark's own engine waits in its queue."""

from __future__ import annotations

import asyncio
from typing import Any

import tiny_models
from runtime.config import Args
from serve.bench.load import run_with_engine


def test_the_queue_of_a_benchmark_has_no_limit_of_its_own() -> None:
    async def work(engine: Any) -> int:
        sampling = {"max_new_tokens": 2, "ignore_eos": True}
        asked = [engine.generate(input_ids=[5, 6], sampling_params=sampling) for _ in range(20)]
        return len(await asyncio.gather(*asked))

    args = Args.of(model_path=tiny_models.cached(), max_running_requests=2, max_total_tokens=512)
    assert run_with_engine(args, work) == 20
