"""Published checkpoints of models that transformers does not contain, written from an equivalent model's checkpoint.

Each function follows the published definition of one model. It converts the tensors and the configuration of a model
that transformers computes (the twin) to the names and the layout of the published checkpoint, whose logits are then
those of the twin.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Config = dict[str, Any]
Publish = Callable[[Tensors, Config], tuple[Tensors, Config]]


def renamed(tensors: Mapping[str, Tensor], *names: tuple[str, str]) -> Tensors:
    """Replace patterns in the names of tensors, one after the other."""
    found = {}
    for name, tensor in tensors.items():
        for pattern, replacement in names:
            name = re.sub(pattern, replacement, name)
        found[name] = tensor.clone()
    return found


def joined(tensors: Mapping[str, Tensor], parts: tuple[str, ...], name: str) -> Tensors:
    """Join tensors whose names differ in one part, along their rows."""
    found = dict(tensors)
    for first in [each for each in tensors if f".{parts[0]}." in each]:
        rows = [found.pop(first.replace(f".{parts[0]}.", f".{part}.")) for part in parts]
        found[first.replace(f".{parts[0]}.", f".{name}.")] = torch.cat(rows)
    return found


def without(config: Config, *names: str) -> Config:
    return {name: value for name, value in config.items() if name not in names}


QKV = ("q_proj", "k_proj", "v_proj")


def xverse(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """Llama without other names."""
    return tensors, config


def exaone(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """EXAONE 3: Llama with names of GPT-2."""
    found = renamed(
        tensors,
        (r"^model\.embed_tokens", "transformer.wte"),
        (r"^model\.norm", "transformer.ln_f"),
        (r"^model\.layers", "transformer.h"),
        ("input_layernorm", "ln_1"),
        ("post_attention_layernorm", "ln_2"),
        (r"self_attn\.o_proj", "attn.attention.out_proj"),
        (r"self_attn\.", "attn.attention."),
        ("gate_proj", "c_fc_0"),
        ("up_proj", "c_fc_1"),
        ("down_proj", "c_proj"),
    )
    values = without(config, "num_hidden_layers", "hidden_act", "rms_norm_eps", "rope_parameters", "model_type")
    own = {
        "num_layers": config["num_hidden_layers"],
        "activation_function": config["hidden_act"],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "model_type": "exaone",
    }
    return found, {**values, **own}


def mimo(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """Qwen 2 with a layer that predicts further tokens."""
    extra = {"model.mtp_layers.0.input_proj.weight": torch.ones(4, 4)}
    return {**tensors, **extra}, {**config, "model_type": "mimo", "num_nextn_predict_layers": 1}


def minicpm(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """MiniCPM: a scaled embedding, sub-layers scaled by the depth, and logits divided by the width (arXiv 2404.06395).

    The twin is Granite with the multipliers that follow.
    """
    names = ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling", "model_type")
    depth = config["residual_multiplier"] * config["num_hidden_layers"] ** 0.5
    own = {
        "scale_emb": config["embedding_multiplier"],
        "scale_depth": depth,
        "dim_model_base": config["hidden_size"] / config["logits_scaling"],
        "model_type": "minicpm",
    }
    return tensors, {**without(config, *names), **own}


def qwen1(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """Qwen 1: w2 is the gate and w1 the other input; `intermediate_size` counts both."""
    found = renamed(
        joined(tensors, QKV, "c_attn"),
        (r"^model\.embed_tokens", "transformer.wte"),
        (r"^model\.norm", "transformer.ln_f"),
        (r"^model\.layers", "transformer.h"),
        ("input_layernorm", "ln_1"),
        ("post_attention_layernorm", "ln_2"),
        (r"self_attn\.o_proj", "attn.c_proj"),
        (r"self_attn\.", "attn."),
        ("gate_proj", "w2"),
        ("up_proj", "w1"),
        ("down_proj", "c_proj"),
    )
    own = {
        "hidden_size": config["hidden_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "vocab_size": config["vocab_size"],
        "kv_channels": config["head_dim"],
        "intermediate_size": 2 * config["intermediate_size"],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "rotary_emb_base": config["rope_parameters"]["rope_theta"],
        "rotary_pct": 1.0,
        "seq_length": config["max_position_embeddings"],
        "max_position_embeddings": 4 * config["max_position_embeddings"],
        "no_bias": True,
        "use_dynamic_ntk": True,
        "use_logn_attn": True,
        "tie_word_embeddings": False,
        "model_type": "qwen",
        "eos_token_id": config["eos_token_id"],
    }
    return found, own


def chatglm(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """ChatGLM 3 and GLM-4 of 2024: the twin is the model that transformers calls `glm`."""
    found = renamed(
        joined(tensors, QKV, "query_key_value"),
        (r"^model\.embed_tokens", "transformer.embedding.word_embeddings"),
        (r"^model\.norm", "transformer.encoder.final_layernorm"),
        (r"^lm_head", "transformer.output_layer"),
        (r"^model\.layers", "transformer.encoder.layers"),
        (r"self_attn\.o_proj", "self_attention.dense"),
        (r"self_attn\.", "self_attention."),
        ("gate_up_proj", "dense_h_to_4h"),
        ("down_proj", "dense_4h_to_h"),
    )
    found["transformer.rotary_pos_emb.inv_freq"] = torch.ones(4)
    own = {
        "hidden_size": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_attention_heads": config["num_attention_heads"],
        "multi_query_attention": True,
        "multi_query_group_num": config["num_key_value_heads"],
        "kv_channels": config["head_dim"],
        "ffn_hidden_size": config["intermediate_size"],
        "padded_vocab_size": config["vocab_size"],
        "layernorm_epsilon": config["rms_norm_eps"],
        "rope_ratio": config["rope_parameters"]["rope_theta"] / 10000.0,
        "seq_length": config["max_position_embeddings"],
        "add_qkv_bias": config["attention_bias"],
        "add_bias_linear": False,
        "rmsnorm": True,
        "post_layer_norm": True,
        "original_rope": True,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": False,
        "model_type": "chatglm",
        "eos_token_id": config["eos_token_id"],
    }
    return found, own


def half_of_shared(tensors: Tensors) -> Tensors:
    """Remove the twin's gate of the shared expert. Its weight is 0, so that the twin halves the expert's output."""
    found = {name: tensor for name, tensor in tensors.items() if "shared_expert_gate" not in name}
    return {name: tensor / 2 if "shared_expert.down" in name else tensor for name, tensor in found.items()}


def deepseek(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """DeepSeek MoE: the twin is Qwen 2 MoE whose shared expert is always on."""
    size = config["moe_intermediate_size"]
    own = {
        "model_type": "deepseek",
        "n_routed_experts": config["num_experts"],
        "n_shared_experts": config["shared_expert_intermediate_size"] // size,
        "first_k_dense_replace": len(config["mlp_only_layers"]),
        "moe_layer_freq": 1,
        "scoring_func": "softmax",
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "attention_bias": config["qkv_bias"],
    }
    names = ("num_experts", "shared_expert_intermediate_size", "mlp_only_layers", "rope_parameters", "qkv_bias")
    found = renamed(half_of_shared(tensors), (r"shared_expert\.", "shared_experts."))
    return found, {**without(config, *names), **own}


def bailing(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """Ling: routes like DeepSeek MoE. The twin's LM head has columns of length one, the published one has not."""
    head = tensors["lm_head.weight"]
    tensors = {**tensors, "lm_head.weight": head * torch.linspace(0.5, 3, head.shape[1])}
    found = renamed(
        joined(half_of_shared(tensors), QKV, "query_key_value"),
        (r"^model\.embed_tokens", "model.word_embeddings"),
        (r"self_attn\.o_proj", "attention.dense"),
        (r"self_attn\.", "attention."),
        (r"shared_expert\.", "shared_experts."),
    )
    size = config["moe_intermediate_size"]
    own = {
        "model_type": "bailing_moe",
        "num_shared_experts": config["shared_expert_intermediate_size"] // size,
        "first_k_dense_replace": len(config["mlp_only_layers"]),
        "norm_head": True,
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "use_bias": False,
        "use_qkv_bias": config["qkv_bias"],
    }
    names = ("shared_expert_intermediate_size", "mlp_only_layers", "rope_parameters", "qkv_bias", "attention_bias")
    return found, {**without(config, *names), **own}


def bailing_v2(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """Ling 2.0: the twin is GLM-4.5 with norms of q and k."""
    found = renamed(
        joined(tensors, QKV, "query_key_value"),
        (r"^model\.embed_tokens", "model.word_embeddings"),
        (r"self_attn\.o_proj", "attention.dense"),
        (r"self_attn\.q_norm", "attention.query_layernorm"),
        (r"self_attn\.k_norm", "attention.key_layernorm"),
        (r"self_attn\.", "attention."),
        ("e_score_correction_bias", "expert_bias"),
    )
    own = {
        "model_type": "bailing_moe_v2",
        "num_experts": config["n_routed_experts"],
        "num_shared_experts": config["n_shared_experts"],
        "moe_shared_expert_intermediate_size": config["moe_intermediate_size"],
        "score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "use_bias": False,
        "use_qkv_bias": config["attention_bias"],
        "use_qk_norm": True,
        "rope_theta": config["rope_parameters"]["rope_theta"],
        "partial_rotary_factor": config["rope_parameters"]["partial_rotary_factor"],
    }
    names = ("n_routed_experts", "n_shared_experts", "rope_parameters", "attention_bias")
    return found, {**without(config, *names), **own}


# Layers of the tiny model: without attention, with both parts, without an MLP.
NO_ATTENTION, NO_MLP = 0, 2


def nemotron_nas(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """Llama-Nemotron: the twin is Llama, whose removed parts have an output projection of 0."""
    removed = (
        f"layers.{NO_ATTENTION}.self_attn.",
        f"layers.{NO_ATTENTION}.input_layernorm.",
        f"layers.{NO_MLP}.mlp.",
        f"layers.{NO_MLP}.post_attention_layernorm.",
    )
    found = {name: each for name, each in tensors.items() if not any(part in name for part in removed)}
    group = config["num_attention_heads"] // config["num_key_value_heads"]
    attention = {"n_heads_in_group": group, "no_op": False, "replace_with_linear": False}
    ffn = {"intermediate_size": config["intermediate_size"], "no_op": False, "replace_with_linear": False}
    blocks = [{"attention": dict(attention), "ffn": dict(ffn)} for _ in range(config["num_hidden_layers"])]
    blocks[NO_ATTENTION]["attention"] = {"no_op": True, "n_heads_in_group": None, "replace_with_linear": False}
    blocks[NO_MLP]["ffn"] = {"no_op": True, "ffn_mult": None, "replace_with_linear": False}
    own = {"model_type": "nemotron-nas", "block_configs": blocks, "num_key_value_heads": None}
    return found, {**without(config, "intermediate_size"), **own}


def before_saving(family: str, model: Any) -> None:
    """Change the twin's weights so that the published model can have the same logits."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if family in ("deepseek", "bailing") and "shared_expert_gate" in name:
                parameter.zero_()
            if family == "bailing" and name == "lm_head.weight":
                parameter.copy_(torch.nn.functional.normalize(parameter, dim=0))
            no_attention = f"layers.{NO_ATTENTION}.self_attn.o_proj" in name
            if family == "nemotron_nas" and (no_attention or f"layers.{NO_MLP}.mlp.down_proj" in name):
                parameter.zero_()


# Maps a family to the twin's configuration in transformers, the published architecture, and the conversion.
PUBLISHED: Mapping[str, tuple[str, str, Publish]] = {
    "bailing": ("qwen2_moe", "BailingMoeForCausalLM", bailing),
    "bailing_v2": ("glm4_moe", "BailingMoeV2ForCausalLM", bailing_v2),
    "chatglm": ("glm", "ChatGLMModel", chatglm),
    "deepseek": ("qwen2_moe", "DeepseekForCausalLM", deepseek),
    "exaone": ("llama", "ExaoneForCausalLM", exaone),
    "mimo": ("qwen2", "MiMoForCausalLM", mimo),
    "minicpm": ("granite", "MiniCPMForCausalLM", minicpm),
    "nemotron_nas": ("llama", "DeciLMForCausalLM", nemotron_nas),
    "qwen1": ("qwen2", "QWenLMHeadModel", qwen1),
    "xverse": ("llama", "XverseForCausalLM", xverse),
}
