"""Tiny random checkpoints of every family, written by transformers.

The numbers are redrawn: with transformers' own initialisation (small matrices, norms of 1, biases of 0) a
model that forgets a norm's weight, a bias or a window still gives nearly the same logits.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.gemma import GemmaConfig
from transformers.models.gemma2 import Gemma2Config
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.phi3 import Phi3Config
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_moe import Qwen3MoeConfig

CONFIGS = {
    "gemma": GemmaConfig,
    "gemma2": Gemma2Config,
    "llama": LlamaConfig,
    "mistral": MistralConfig,
    "phi3": Phi3Config,
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "qwen3_moe": Qwen3MoeConfig,
}
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,  # large enough to be noticed
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "sliding_window": None,
}
OWN = {  # of a family
    "gemma2": {
        "sliding_window": 9,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 5,
    },
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
    },
}


def write(
    directory: Path | str,
    family: str = "llama",
    *,
    vocab_size: int = 128,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    **config_overrides: Any,
) -> str:
    """Write a checkpoint without a tokenizer and return its path. Overrides are configuration fields."""
    values = {**SHAPE, **OWN.get(family, {}), **config_overrides}
    config = CONFIGS[family](vocab_size=vocab_size, **values)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    redraw(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
    return str(directory)


def cached(family: str = "llama", **arguments: Any) -> str:
    """As `write`, once per process and set of arguments, in a directory that goes with the process.

    For tests that only read the checkpoint.
    """
    return _write_once(family, json.dumps(arguments, sort_keys=True))


@cache
def _write_once(family: str, arguments: str) -> str:
    return write(
        Path(_scratch().name) / str(_write_once.cache_info().misses), family, **json.loads(arguments)
    )


@cache
def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="tiny-checkpoints-")


def redraw(model: PreTrainedModel, seed: int) -> None:
    """Matrices of standard deviation 0.2, norms and biases around what does nothing but well off it."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        norm = 0.0 if model.config.model_type.startswith("gemma") else 1.0  # what a norm's weight says 1 with
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(norm + 0.3 * noise)


def reference(path: str, token_ids: list[int]) -> torch.Tensor:
    """What transformers computes: float32 logits [T, V] of one sequence, in one pass."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
