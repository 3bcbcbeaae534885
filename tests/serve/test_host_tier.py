"""With --enable-hierarchical-cache, evicted prefixes come back from host memory with the same tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from greedy import GREEDY, model_path, prompts, reference
from ops.machine import Machine
from runtime.actors.status import Status
from runtime.config import Args
from runtime.config.resolve import resolve
from runtime.errors import ConfigurationError
from runtime.kv_cache.host_tier import TierCounts
from serve import Engine
from small_facts import FACTS

SMALL = {
    "skip_tokenizer_init": True,
    "random_seed": 1,
    "max_total_tokens": 288,
    "page_size": 4,
    "enable_hierarchical_cache": True,
    "hicache_ratio": 40.0,
}


async def served(family: str, **options: Any) -> tuple[Status, list[int]]:
    """Serve all prompts three times with a pool that cannot keep them, and check their tokens.

    Returns the status, and the number of cached tokens of each prompt in the last round.
    """
    cached: list[int] = []
    async with Engine(model_path(family), **{**SMALL, **options}) as engine:
        for _ in range(3):
            answers = await engine.generate(input_ids=prompts(), sampling_params=GREEDY)
            assert [answer["output_ids"] for answer in answers] == reference(family)
            cached = [answer["meta_info"]["cached_tokens"] for answer in answers]
        engine.core.check()
        return engine.status(), cached


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"hicache_write_policy": "write_back", "hicache_mem_layout": "page_first"}),
        ("llama", {"hicache_write_policy": "write_through_selective", "hicache_io_backend": "direct"}),
        ("llama", {"disable_overlap_schedule": True, "chunked_prefill_size": 16}),
        ("llama", {"kv_cache_dtype": "fp8_e5m2", "hicache_mem_layout": "page_first"}),
        ("llama", {"swap_space": 0.01, "schedule_conservativeness": 0.0}),
        ("deepseek_v3", {"hicache_mem_layout": "page_first"}),  # keys and values share a tensor
        ("mistral", {}),  # sliding windows
        pytest.param("llama", {"tp_size": 2, "hicache_mem_layout": "page_first"}, marks=pytest.mark.slow),
        pytest.param("llama", {"pp_size": 2}, marks=pytest.mark.slow),
        pytest.param("llama", {"dp_size": 2}, marks=pytest.mark.slow),
    ],
)
async def test_prefixes_come_back_with_the_same_tokens(family: str, options: dict[str, Any]):
    if "kv_cache_dtype" in options:  # the reference has another precision
        async with Engine(model_path(family), **{**SMALL, **options, "max_total_tokens": 8192}) as engine:
            plainly = await engine.generate(input_ids=prompts(), sampling_params=GREEDY)
        async with Engine(model_path(family), **{**SMALL, **options}) as engine:
            for _ in range(2):
                again = await engine.generate(input_ids=prompts(), sampling_params=GREEDY)
            assert [answer["output_ids"] for answer in again] == [answer["output_ids"] for answer in plainly]
            assert engine.status().host_tier.num_restored
        return
    status, cached = await served(family, **options)
    tier = status.host_tier
    assert tier.num_written > 0
    assert tier.num_restored > 0
    assert status.num_used_pages == 0
    if options.get("hicache_write_policy") == "write_through_selective":
        return  # holds only what a second request found on the device
    # All full pages before the last token of each prompt.
    full = [(len(prompt) - 1) // 4 * 4 for prompt in prompts()]
    assert sum(cached) >= 0.9 * sum(full)


async def test_without_the_tier_the_pool_cannot_keep_them():
    status, cached = await served("llama", enable_hierarchical_cache=False, hicache_ratio=2.0)
    assert status.host_tier == TierCounts()
    assert sum(cached) < 0.5 * sum((len(prompt) - 1) // 4 * 4 for prompt in prompts())


async def test_flush_empties_the_tier():
    async with Engine(model_path("llama"), **SMALL) as engine:
        await engine.generate(input_ids=prompts(), sampling_params=GREEDY)
        assert engine.status().host_tier.num_used
        assert engine.core.flush_cache()
        assert not engine.status().host_tier.num_used
        answers = await engine.generate(input_ids=prompts()[:1], sampling_params=GREEDY)
        assert answers[0]["meta_info"]["cached_tokens"] == 0


async def test_a_tier_larger_than_the_machine_is_refused():
    with pytest.raises(ConfigurationError, match=r"needs .* GiB of host memory"):
        async with Engine(model_path("llama"), **{**SMALL, "hicache_size": 10**6}):
            pass


def refusals(facts: Any = FACTS, **options: Any) -> str:
    with pytest.raises(ConfigurationError) as refused:
        resolve(Args.of(model_path="/models/small", **options), Machine.named("cpu"), facts)
    return str(refused.value)


def test_what_cannot_work_is_refused_with_its_reason():
    assert "--hicache-size needs --enable-hierarchical-cache" in refusals(hicache_size=1)
    on: dict[str, Any] = {"enable_hierarchical_cache": True}
    assert "turns prefix caching off" in refusals(**on, disable_radix_cache=True)
    assert "states of recurrent layers" in refusals(replace(FACTS, recurrent=True), **on)
    assert "caches nothing" in refusals(replace(FACTS, is_encoder=True), **on)
