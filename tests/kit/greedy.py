"""Twenty prompts and the greedy outputs of transformers, for every family."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import torch

import tiny_checkpoints

FAMILIES = tiny_checkpoints.FAMILIES
RECURRENT = (
    "granitemoehybrid", "lfm2", "lfm2_moe", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_seeing", "qwen3_5_seeing",
    "qwen3_next",
)  # fmt: skip
# The same factors within the trained context and beyond, because transformers chooses them in each step.
FACTORS = [1.0, 1.2, 1.7, 2.5]
OWN: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 21},
    "phi3": {
        "hidden_size": 64,
        "sliding_window": 33,
        "original_max_position_embeddings": 64,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 64,
            "short_factor": FACTORS,
            "long_factor": FACTORS,
        },
    },
    "qwen3": {"tie_word_embeddings": True},
}
NUM_NEW = 24
GREEDY = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}


@cache
def model_path(family: str) -> str:
    """Return a checkpoint whose head sizes the C++ kernels support."""
    return tiny_checkpoints.cached(family, max_position_embeddings=512, head_dim=16, **OWN.get(family, {}))


@cache
def prompts() -> list[list[int]]:
    """Return twenty prompts of 1 to 60 tokens, of which some share a prefix."""
    draw = random.Random(0)
    fresh = [[draw.randrange(3, 128) for _ in range(length)] for length in (1, 2, 5, 16, 17, 33, 48, 60, 9, 31)]
    return fresh + [prompt[: 1 + len(prompt) // 2] + [draw.randrange(3, 128)] * 3 for prompt in fresh]


@cache
def reference(family: str) -> list[list[int]]:
    """Return transformers' greedy tokens of all prompts.

    All prompts share each forward pass. Padding follows a prompt's last token, and no model reads later tokens.
    """
    torch.set_num_threads(1)
    path = model_path(family)
    model: Any = tiny_checkpoints.auto_of(path).from_pretrained(tiny_checkpoints.readable(path), dtype=torch.float32)
    ends = torch.tensor([len(prompt) for prompt in prompts()])
    rows = torch.arange(len(ends))
    token_ids = torch.zeros(len(ends), int(ends.max()) + NUM_NEW, dtype=torch.int64)
    for row, prompt in enumerate(prompts()):
        token_ids[row, : len(prompt)] = torch.tensor(prompt)
    for _ in range(NUM_NEW):
        with torch.inference_mode():
            logits = model(token_ids[:, : ends.max()], use_cache=False).logits
        token_ids[rows, ends] = logits[rows, ends - 1].argmax(-1)
        ends = ends + 1
    return [row[end - NUM_NEW : end].tolist() for row, end in zip(token_ids, ends.tolist(), strict=True)]
