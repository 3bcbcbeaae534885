"""Prompts, options and a tiny model with which several ranks are compared with one."""

from __future__ import annotations

from functools import cache

import tiny_checkpoints
from serve import Engine

PLAIN = {"skip_tokenizer_init": True, "random_seed": 1}
GREEDY = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
LONG = {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True}
# Chunks, and a pool so small that sequences are retracted and recomputed.
TIGHT = {
    "chunked_prefill_size": 16,
    "page_size": 4,
    "max_total_tokens": 288,
    "schedule_conservativeness": 0.0,
}
# Families with experts -> the name of the number of experts in config.json.
MIXTURES = {
    "mixtral": "num_local_experts",
    "qwen3_moe": "num_experts",
    "deepseek_v3": "n_routed_experts",
    "gpt_oss": "num_local_experts",
    "glm4_moe": "n_routed_experts",
    "granitemoe": "num_local_experts",
}


@cache
def model_path(family: str = "llama") -> str:
    return tiny_checkpoints.cached(
        family, max_position_embeddings=512, tie_word_embeddings=family == "qwen3", vocab_size=131
    )


def prompts() -> list[list[int]]:
    fresh = [[3 + (7 * i + n) % 100 for i in range(n)] for n in (1, 2, 5, 16, 17, 33, 60, 9)]
    return fresh + [[*prompt[: 1 + len(prompt) // 2], 4, 5] for prompt in fresh]


async def outputs(engine: Engine) -> list[list[int]]:
    answers = await engine.generate(input_ids=prompts(), sampling_params=GREEDY)
    return [answer["output_ids"] for answer in answers]


async def cancel_some(engine: Engine) -> None:
    """Cancel requests in the middle of their output."""
    for prompt in prompts()[:3]:
        pieces = engine.stream(input_ids=prompt, sampling_params=LONG)
        await anext(pieces)
        await pieces.aclose()
