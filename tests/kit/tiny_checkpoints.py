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
from transformers import (
    ArceeConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    Gemma3Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    MinistralConfig,
    MixtralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoConfig,
    OlmoeConfig,
    PhiConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
)
from transformers.models.gemma import GemmaConfig
from transformers.models.gemma2 import Gemma2Config
from transformers.models.internlm3 import InternLM3Config
from transformers.models.llama import LlamaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.phi3 import Phi3Config
from transformers.models.qwen2 import Qwen2Config
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config, Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeTextConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_next import Qwen3NextConfig


def seeing_gemma3(**text: Any) -> Gemma3Config:
    """Gemma 3 with eyes, of which only the text part is served."""
    eyes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Gemma3Config(
        text_config=text,
        vision_config={**eyes, "image_size": 28, "patch_size": 14},
        tie_word_embeddings=text.get("tie_word_embeddings", True),
        **{name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def deepseek_v3(**values: Any) -> DeepseekV3Config:
    """Its angles are for heads of `head_dim`, whatever is rotated."""
    return DeepseekV3Config(**{**values, "head_dim": values["qk_rope_head_dim"]})


def seeing_qwen3_5(**text: Any) -> Qwen3_5Config:
    """Qwen 3.5 with eyes, of which only the text part is served."""
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 14}
    return Qwen3_5Config(
        text_config=text,
        vision_config={**eyes, "out_hidden_size": text["hidden_size"]},
        **{name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def seeing_qwen3_5_moe(**text: Any) -> Qwen3_5MoeConfig:
    """The same with experts."""
    values: Any = {**seeing_qwen3_5(**text).to_diff_dict(), "text_config": text}
    return Qwen3_5MoeConfig(**values)


CONFIGS = {
    "arcee": ArceeConfig,
    "cohere": CohereConfig,
    "cohere2": Cohere2Config,
    "deepseek_v2": DeepseekV2Config,
    "deepseek_v3": deepseek_v3,
    "ernie4_5": Ernie4_5Config,
    "ernie4_5_moe": Ernie4_5_MoeConfig,
    "exaone4": Exaone4Config,
    "gemma": GemmaConfig,
    "gemma2": Gemma2Config,
    "gemma3": Gemma3TextConfig,
    "gemma3_seeing": seeing_gemma3,
    "glm": GlmConfig,
    "glm4": Glm4Config,
    "glm4_moe": Glm4MoeConfig,
    "glm4_moe_lite": Glm4MoeLiteConfig,
    "gpt_neox": GPTNeoXConfig,
    "gpt_oss": GptOssConfig,
    "granite": GraniteConfig,
    "granitemoe": GraniteMoeConfig,
    "granitemoehybrid": GraniteMoeHybridConfig,
    "hunyuan_v1_dense": HunYuanDenseV1Config,
    "internlm3": InternLM3Config,
    "llama": LlamaConfig,
    "ministral": MinistralConfig,
    "mistral": MistralConfig,
    "mixtral": MixtralConfig,
    "nemotron": NemotronConfig,
    "olmo": OlmoConfig,
    "olmo2": Olmo2Config,
    "olmo3": Olmo3Config,
    "olmoe": OlmoeConfig,
    "phi": PhiConfig,
    "phi3": Phi3Config,
    "qwen2": Qwen2Config,
    "qwen2_moe": Qwen2MoeConfig,
    "qwen3": Qwen3Config,
    "qwen3_5": Qwen3_5TextConfig,
    "qwen3_5_moe": Qwen3_5MoeTextConfig,
    "qwen3_5_moe_seeing": seeing_qwen3_5_moe,
    "qwen3_5_seeing": seeing_qwen3_5,
    "qwen3_moe": Qwen3MoeConfig,
    "qwen3_next": Qwen3NextConfig,
    "seed_oss": SeedOssConfig,
    "smollm3": SmolLM3Config,
    "stablelm": StableLmConfig,
    "starcoder2": Starcoder2Config,
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
SEEING = {"qwen3_5_seeing", "qwen3_5_moe_seeing"}  # whose text part is a class of its own
PUBLISHED_AS = {"internlm3": "InternLM3ForCausalLM"}  # which transformers saves as Llama
FULL, SLIDING = "full_attention", "sliding_attention"
WIDE = {"hidden_size": 64, "head_dim": 16}  # for families whose heads always fill the hidden size
EPS = {"layer_norm_eps": 1e-3}
OWN = {  # of a family
    "cohere": {**WIDE, **EPS, "logit_scale": 0.5},
    "cohere2": {
        **WIDE,
        **EPS,
        "logit_scale": 0.5,
        "sliding_window": 9,
        "layer_types": [SLIDING, FULL, SLIDING],
    },
    "gpt_neox": {**WIDE, **EPS, "num_key_value_heads": 4},
    "nemotron": {"norm_eps": 1e-3},
    "olmo": WIDE,
    "phi": {**WIDE, **EPS},
    "stablelm": {**WIDE, **EPS},
    "starcoder2": {**WIDE, "norm_epsilon": 1e-3},
    "exaone4": {"sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING]},
    "gemma2": {
        "sliding_window": 9,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 5,
    },
    "gemma3": {
        "sliding_window": 9,
        "query_pre_attn_scalar": 5,
        "layer_types": [SLIDING, FULL, SLIDING],
        "rope_parameters": {
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 20,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    "glm4_moe": {
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 20,
        "n_group": 3,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        "topk_group": 2,
    },
    "granitemoe": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "intermediate_size": 20,
        "logits_scaling": 2.0,
        "num_experts_per_tok": 2,
        "num_local_experts": 6,
        "residual_multiplier": 0.4,
    },
    "gpt_oss": {
        "intermediate_size": 20,
        "layer_types": [SLIDING, FULL, SLIDING],
        "num_experts_per_tok": 2,
        "num_local_experts": 6,
        "sliding_window": 9,
    },
    "granite": {
        "attention_multiplier": 0.2,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.4,
    },
    "ministral": {"sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING]},
    "mixtral": {"intermediate_size": 20, "num_experts_per_tok": 2, "num_local_experts": 6},
    "olmoe": {
        "hidden_size": 64,
        "head_dim": 16,
        "intermediate_size": 20,
        "num_experts_per_tok": 2,
        "num_experts": 6,
    },
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "shared_expert_intermediate_size": 24,
    },
    "olmo3": {
        "sliding_window": 9,
        "layer_types": [SLIDING, FULL, SLIDING],
        "rope_parameters": {
            FULL: {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 1e4,
            },
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "smollm3": {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [1, 0, 1]},
    "qwen3_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "norm_topk_prob": True,
    },
}


DELTA_NET = {
    "layer_types": ["linear_attention", FULL, "linear_attention"],
    "linear_key_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 10,
}
OWN["qwen3_5"] = DELTA_NET
OWN["qwen3_5_seeing"] = DELTA_NET
OWN["qwen3_5_moe"] = OWN["qwen3_5_moe_seeing"] = {**DELTA_NET, **OWN["qwen2_moe"]}
OWN["qwen3_next"] = {**DELTA_NET, **OWN["qwen2_moe"], "norm_topk_prob": True}
OWN["granitemoehybrid"] = {
    **OWN["granitemoe"],
    "layer_types": DELTA_NET["layer_types"],
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_n_heads": 4,
    "shared_intermediate_size": 24,
}
LATENT = {
    **OWN["glm4_moe"],
    "kv_lora_rank": 24,
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
OWN["deepseek_v2"] = {**LATENT, "topk_group": 1, "topk_method": "group_limited_greedy"}
OWN["deepseek_v3"] = OWN["glm4_moe_lite"] = LATENT
OWN["gemma3_seeing"] = OWN["gemma3"]


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
    kind = AutoModelForImageTextToText if family in SEEING else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    redraw(model, seed)
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)
    if family in PUBLISHED_AS:
        file = Path(directory) / "config.json"
        saved = json.loads(file.read_text(encoding="utf-8"))
        saved["architectures"] = [PUBLISHED_AS[family]]
        file.write_text(json.dumps(saved), encoding="utf-8")
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
        # What a norm's weight says 1 with.
        norm = 0.0 if model.config.model_type.startswith(("gemma", "qwen3_next", "qwen3_5")) else 1.0
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(norm + 0.3 * noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


def reference(path: str, token_ids: list[int]) -> torch.Tensor:
    """What transformers computes: float32 logits [T, V] of one sequence, in one pass."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()
