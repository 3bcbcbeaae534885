"""Measure how busy a device is while an engine answers."""

from __future__ import annotations

import tiny_models
from runtime.worker.model_runner import ModelRunner
from serve import Engine


async def shares_of_a_session(device: str) -> list[float]:
    """Return the busy share of each step while four requests generate 128 tokens."""
    options = {"device": device, "random_seed": 1, "max_total_tokens": 8192}
    async with Engine(tiny_models.cached(), **options) as engine:
        sampling = {"max_new_tokens": 128, "ignore_eos": True}
        prompts = [[5 + row, 6, 7] for row in range(4)]
        await engine.generate(input_ids=prompts, sampling_params=sampling)
        [runner] = engine.core.runners
        assert isinstance(runner, ModelRunner)
        measured = runner.time_steps()
        await engine.generate(input_ids=prompts, sampling_params=sampling)
        return measured.shares()
