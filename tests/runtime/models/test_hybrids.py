"""Models with recurrent layers in the engine: chunks, many sequences, prefix caching, and too little memory."""

from __future__ import annotations

from typing import Any

import pytest

import greedy
import tiny_checkpoints
from ops.machine import Machine
from runtime.config.args import Args
from runtime.config.resolve import resolve
from runtime.errors import ConfigurationError
from runtime.loading.facts import read_facts
from serve import Engine

SMALL = {"chunked_prefill_size": 8, "page_size": 4, "enable_mixed_chunk": True}


async def served_twice(family: str, **options: Any) -> list[int]:
    """Serve the prompts of `greedy` twice. Return how many tokens of each were cached the second time."""
    async with Engine(greedy.model_path(family), skip_tokenizer_init=True, **options) as engine:
        for _ in range(2):
            answers = await engine.generate(input_ids=greedy.prompts(), sampling_params=greedy.GREEDY)
            assert [answer["output_ids"] for answer in answers] == greedy.reference(family)
    return [answer["meta_info"]["cached_tokens"] for answer in answers]


@pytest.mark.parametrize("family", [pytest.param("granitemoehybrid", marks=pytest.mark.slow), "lfm2", "qwen3_next"])
async def test_a_prefix_is_gone_on_from_where_a_state_was_kept(family: str) -> None:
    cached = await served_twice(family, **SMALL, max_mamba_cache_size=900)
    assert cached == [(len(prompt) - 1) // 4 * 4 for prompt in greedy.prompts()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"max_total_tokens": 160},  # so few that sequences are retracted
        {"max_mamba_cache_size": 7},
        {"max_mamba_cache_size": 2},
        {"disable_radix_cache": True},
        {"page_size": 1, "max_mamba_cache_size": 40},
        {"pp_size": 2},
        {"tp_size": 2},
    ],
    ids=str,
)
async def test_tokens_are_the_same_however_little_room_there_is(options: dict[str, Any]) -> None:
    await served_twice("qwen3_5", **{**SMALL, **options})


def test_states_are_for_models_that_have_them() -> None:
    hybrid, plain = (tiny_checkpoints.cached(family) for family in ("qwen3_5", "llama"))
    arguments = {"max_mamba_cache_size": 9, "mamba_ssm_dtype": "bfloat16"}
    plan = resolve(Args.of(model_path=hybrid, **arguments), Machine.probe(), read_facts(hybrid))
    assert (plan.cache.max_states, plan.model.state_dtype) == (9, "bfloat16")
    with pytest.raises(ConfigurationError, match="LlamaForCausalLM has no recurrent layers"):
        resolve(Args.of(model_path=plain, **arguments), Machine.probe(), read_facts(plain))
