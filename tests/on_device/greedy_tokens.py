"""Greedy answers of an engine on a device, against transformers."""

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

# Larger than the tiny checkpoints, because FlashInfer supports only heads of 64, 128 and 256 dimensions.
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "head_dim": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
# Families for which transformers ignores head_dim, or requires as many kv heads as heads.
OWN_WIDE = {
    **{
        name: {"kv_lora_rank": 56, "head_dim": 8, "num_key_value_heads": 4}
        for name in ("deepseek_v2", "glm4_moe_lite", "minicpm3")
    },
    # the size of latent vectors for which FlashInfer has kernels
    "deepseek_v3": {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "num_key_value_heads": 4},
    **{
        name: {"hidden_size": 256, "num_key_value_heads": 4}
        for name in ("bloom", "falcon", "falcon_rw", "gpt_neox", "mpt", "mpt_before")
    },
    "olmoe": {"hidden_size": 256},
    "qwen1": {"num_key_value_heads": 4},
    "stablelm": {"hidden_size": 256},
}
SEEDED = {**GREEDY, "temperature": 0.8, "top_p": 0.9, "min_p": 0.02, "seed": 11}
# Maximum distance of a chosen token's logit from the best, in standard deviations of the logits: three times the
# distances measured with plain torch on a CPU. The best of 128 logits is about 2.5 above the mean; wrong tokens were 5
# below the best.
MARGINS = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.5}
MEAN_MARGIN = 0.2  # maximum mean over all tokens, with an 8-bit cache


def wide_path(family: str) -> str:
    return tiny_checkpoints.cached(family, **WIDE | OWN_WIDE.get(family, {}))


async def answers(
    path: str, device: str, *, dtype: str = "float32", sampling: Mapping[str, Any] = GREEDY, **options: Any
) -> list[list[int]]:
    """Return the answers to the twenty prompts, submitted at once, two times; the second time uses the prefix cache."""
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
    """Raise AssertionError if the second answers differ from the first (only in float32, which has no near ties)."""
    first, second = [await ids_of(engine, sampling), await ids_of(engine, sampling)]
    if engine.core.plan.model.dtype == "float32":
        assert first == second
    return second


async def ids_of(engine: Engine, sampling: Mapping[str, Any] = GREEDY) -> list[list[int]]:
    found = await engine.generate(input_ids=prompts(), sampling_params=dict(sampling))
    return [answer["output_ids"] for answer in found]


def shortfalls(path: str, device: str, dtype: str, found: list[list[int]]) -> list[float]:
    """Return how far each chosen token's logit is below the best logit, computed by transformers.

    The unit is standard deviations of the logits. They are computed in float32 from weights rounded to `dtype`, for the
    generated prefix, so that one near tie does not invalidate the following tokens.
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
    """Raise AssertionError if a token's logit is too far below the best.

    With routed experts the mean counts: in 16 bits a router may choose another of two nearly equal experts, which
    changes a token's logits completely.
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
