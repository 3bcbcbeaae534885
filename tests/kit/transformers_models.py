"""Tiny random checkpoints of causal language models of transformers, of any kind that its tables know."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tiny_checkpoints import redraw

# Whatever of these a configuration has.
SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "head_dim": 16, "sliding_window": 9,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2,
    "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 256, "rotary_dim": 8,
    "d_model": 64, "n_layers": 2, "n_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64, "num_layers": 2,
    "embedding_size": 64,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 24,
}  # fmt: skip
PROMPTS = [[3 + 2 * index + row for index in range(5 + 6 * row)] for row in range(4)]
NEW_TOKENS = 10


@cache
def checkpoint(model_type: str) -> str:
    """A checkpoint of this kind in a folder that goes with the process."""
    folder = str(Path(_scratch().name) / model_type)
    model = AutoModelForCausalLM.from_config(config(model_type), dtype=torch.float32)
    redraw(model, seed=0)
    model.save_pretrained(folder)
    return folder


def config(model_type: str) -> Any:
    kind = CONFIG_MAPPING[model_type]
    usual = kind()
    values = {name: value for name, value in SMALL.items() if hasattr(usual, name)}
    if getattr(usual, "sliding_window", None) is None:
        values.pop("sliding_window", None)
    if "kv_lora_rank" in values:  # latent attention has a key for each head, of two parts
        values |= {"num_key_value_heads": 4} | ({"head_dim": 8} if "head_dim" in values else {})
    return kind(**values)


def greedy(model_type: str) -> list[list[int]]:
    """The tokens that transformers chooses for each of `PROMPTS`, one whole pass for each."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint(model_type), dtype=torch.float32, attn_implementation="eager"
    )
    found = []
    for prompt in PROMPTS:
        ids = list(prompt)
        with torch.no_grad():
            for _ in range(NEW_TOKENS):
                ids.append(int(model(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


@cache
def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="transformers-models-")
