"""Steps in two halves (--enable-two-batch-overlap) give the tokens of whole steps."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import rank_cases
from serve import Engine

CASES: dict[str, dict[str, Any]] = {
    "llama": {"tbo_token_distribution_threshold": 0.0, "speculative_algorithm": "NGRAM"},
    "deepseek_v3": {},
    "qwen3_moe": {"ep_size": 2, "moe_a2a_backend": "all_to_all"},
    "mixtral": {"disable_overlap_schedule": True},
    "gemma2": {},  # sliding windows: its steps are not split
}
SOON = ("deepseek_v3",)


@pytest.mark.parametrize(
    "family", [family if family in SOON else pytest.param(family, marks=pytest.mark.slow) for family in CASES]
)
async def test_halves_give_the_tokens_of_one_process(family: str):
    path, plain = rank_cases.model_path(family), rank_cases.PLAIN
    async with Engine(path, **plain) as engine:
        expected = await rank_cases.outputs(engine)
    options = {**rank_cases.TIGHT, "tp_size": 2, "enable_two_batch_overlap": True, **CASES[family]}
    async with Engine(path, **plain, **options) as engine:
        _, found = await asyncio.gather(rank_cases.cancel_some(engine), rank_cases.outputs(engine))
        assert found == expected
        assert await rank_cases.outputs(engine) == expected
        [scheduler] = engine.core._scheduler.alive
        runner: Any = scheduler.runner
        assert (runner._runner._executor._forward.num_split > 20) == (family != "gemma2")
