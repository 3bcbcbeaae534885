"""Random checkpoints of families other than Llama's, written by transformers: experts, windows, recurrent states.

Like those of `checkpoints.py`, their outputs have no meaning, but every layer costs the same as in the real model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.checkpoints import WEIGHT_STD, write_json, write_tokenizer

END = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


@dataclass(frozen=True, slots=True)
class Family:
    """A configuration of transformers, and a description of its layers."""

    about: str
    model_type: str
    values: Mapping[str, Any]

    @property
    def vocab(self) -> int:
        return self.values["vocab_size"]


FAMILIES: Mapping[str, Family] = {
    "M": Family(
        "Qwen3-MoE of 16 experts, 4 of them and 150M weights for each token",
        "qwen3_moe",
        {
            "hidden_size": 768,
            "num_hidden_layers": 13,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "intermediate_size": 768,
            "moe_intermediate_size": 768,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "vocab_size": 49_152,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
    "G": Family(
        "Gemma-3-270M",
        "gemma3_text",
        {
            "hidden_size": 640,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "intermediate_size": 2048,
            "query_pre_attn_scalar": 256,
            "sliding_window": 512,
            "vocab_size": 262_144,
            "max_position_embeddings": 32_768,
        },
    ),
    "D": Family(
        "DeepSeek-V2-Lite's attention in 12 layers of 16 experts, 2 of them and 304M weights for each token",
        "deepseek_v2",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "intermediate_size": 4096,
            "moe_intermediate_size": 704,
            "n_routed_experts": 16,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "topk_method": "greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "vocab_size": 49_152,
            "max_position_embeddings": 16_384,
        },
    ),
    "H": Family(
        "Granite-4-H of 150M, 12 layers of Mamba 2 and 2 of attention",
        "granitemoehybrid",
        {
            "hidden_size": 768,
            "num_hidden_layers": 14,
            "layer_types": ["attention" if layer in (5, 11) else "mamba" for layer in range(14)],
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "intermediate_size": 2048,
            "shared_intermediate_size": 2048,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": 48,
            "mamba_d_head": 32,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
            "mamba_expand": 2,
            "position_embedding_type": "nope",
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.246,
            "vocab_size": 49_152,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": True,
        },
    ),
}


def write_family(family: Family, directory: Path, seed: int = 0) -> None:
    """Write configuration, bfloat16 weights and tokenizer of a random model.

    Matrices are drawn at random. Smaller tensors (norms, decays of states) keep transformers' initialisation.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    mapping: Any = CONFIG_MAPPING
    model: Any = AutoModelForCausalLM.from_config(
        mapping[family.model_type](**family.values, **END), dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, WEIGHT_STD, generator=generator)
    directory.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(directory)
    if kinds := family.values.get("layer_types"):  # the published format, which transformers before 5.6 reads too
        described = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        write_json(directory / "config.json", {**described, "layer_types": kinds})
    write_json(directory / "generation_config.json", {"eos_token_id": [0, 2], "bos_token_id": 0})
    write_tokenizer(family.vocab, directory, seed)
