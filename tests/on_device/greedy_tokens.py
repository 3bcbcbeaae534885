"""What an engine on a device answers greedily, against transformers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import tiny_checkpoints
from greedy import GREEDY, prompts
from serve import Engine

# Wider than the tiny ones: FlashInfer's kernels know heads of 64, 128 and 256 dimensions only.
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
# Of these, transformers does not read head_dim, or wants as many kv heads as heads.
OWN_WIDE = {
    **{
        name: {"kv_lora_rank": 56, "head_dim": 8, "num_key_value_heads": 4}
        for name in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
    },
    **{
        name: {"hidden_size": 256, "num_key_value_heads": 4}
        for name in ("bloom", "falcon", "falcon_rw", "gpt_neox", "mpt", "mpt_before")
    },
    "olmoe": {"hidden_size": 256},
    "stablelm": {"hidden_size": 256},
}
SEEDED = {**GREEDY, "temperature": 0.8, "top_p": 0.9, "min_p": 0.02, "seed": 11}
# How far below the best a chosen token's logit may lie, in standard deviations of the logits: three times what
# plain torch showed on a CPU. The best of 128 lies about 2.5 above the mean; wrong tokens were 5 below.
MARGINS = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.5}
MEAN_MARGIN = 0.2  # of all tokens, over a cache of 8 bits


def wide_path(family: str) -> str:
    return tiny_checkpoints.cached(family, **WIDE | OWN_WIDE.get(family, {}))


async def answers(
    path: str, device: str, *, dtype: str = "float32", sampling: Mapping[str, Any] = GREEDY, **options: Any
) -> list[list[int]]:
    """The answers to the twenty prompts, all at once, twice: from the prefix cache the second time."""
    async with Engine(path, **engine_options(device, dtype), **options) as engine:
        return await both_times(engine, sampling)


def engine_options(device: str, dtype: str = "float32") -> dict[str, Any]:
    return {
        "device": device,
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "random_seed": 1,
        "max_total_tokens": 8192,
    }


async def both_times(engine: Engine, sampling: Mapping[str, Any] = GREEDY) -> list[list[int]]:
    """AssertionError if the second answers are others than the first (in 32 bits, where nothing is near)."""
    first, second = [await ids_of(engine, sampling), await ids_of(engine, sampling)]
    if engine.core.plan.model.dtype == "float32":
        assert first == second
    return second


async def ids_of(engine: Engine, sampling: Mapping[str, Any] = GREEDY) -> list[list[int]]:
    found = await engine.generate(input_ids=prompts(), sampling_params=dict(sampling))
    return [answer["output_ids"] for answer in found]


def shortfalls(path: str, device: str, dtype: str, found: list[list[int]]) -> list[float]:
    """By how much each chosen token's logit lies below the best, as transformers sees it.

    In standard deviations of the logits, computed in float32 from the weights rounded to `dtype`, with the
    answers so far as they are: one near tie that falls the other way does not make all that follows wrong.
    """
    model = _rounded_model(path, dtype).to(device)
    below: list[float] = []
    for prompt, output in zip(prompts(), found, strict=True):
        with torch.no_grad():
            ids = torch.tensor([prompt + output], device=device)
            logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(output, device=device)[:, None])[:, 0]
        below += ((logits.amax(1) - chosen) / logits.std(1)).tolist()
    return below


def assert_nearly_the_best(path: str, device: str, dtype: str, found: list[list[int]]) -> None:
    """AssertionError if a token's logit is too far below the best.

    Where a router chooses experts, the mean counts: in 16 bits another expert is chosen where two are nearly equal,
    and that token's logits are then others altogether.
    """
    below = shortfalls(path, device, dtype, found)
    if "experts" in Path(path, "config.json").read_text(encoding="utf-8"):
        assert sum(below) / len(below) < MEAN_MARGIN
    else:
        assert max(below) < MARGINS[dtype]


@cache
def _rounded_model(path: str, dtype: str) -> Any:
    torch.set_num_threads(1)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    return model.float().eval()
