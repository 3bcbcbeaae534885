"""Tiny random checkpoints of every family, written by transformers.

All values are drawn anew. With transformers' initialisation (small matrices, norms of 1, biases of 0), a model that
ignores a norm's weight, a bias or a window would give nearly the same logits.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING as _MAPPING

from published_names import PUBLISHED, before_saving

CONFIG_MAPPING: Any = _MAPPING


def seeing_gemma3(**text: Any) -> Any:
    """A multimodal Gemma 3, of which only the text part is served."""
    eyes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return CONFIG_MAPPING["gemma3"](
        text_config=text,
        vision_config={**eyes, "image_size": 28, "patch_size": 14},
        tie_word_embeddings=text.get("tie_word_embeddings", True),
        **{name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def baichuan(**values: Any) -> Any:
    """Baichuan and Baichuan 2 of 7B, which have Llama's layers."""
    return CONFIG_MAPPING["llama"](**{**values, "num_key_value_heads": values["num_attention_heads"]})


def falcon(**values: Any) -> Any:
    """Falcon, whose heads fill the hidden size."""
    return CONFIG_MAPPING["falcon"](**{name: value for name, value in values.items() if name != "head_dim"})


def internlm2(**values: Any) -> Any:
    """InternLM 2, which has Llama's layers. transformers has no model for it."""
    return CONFIG_MAPPING["llama"](**values)


def deepseek_v3(**values: Any) -> Any:
    """DeepSeek V3. transformers computes its angles for heads of `head_dim`."""
    return CONFIG_MAPPING["deepseek_v3"](**{**values, "head_dim": values["qk_rope_head_dim"]})


def seeing_mistral(**text: Any) -> Any:
    """Mistral Small 3.1, a multimodal model, of which only the text part is served."""
    eyes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return CONFIG_MAPPING["mistral3"](
        text_config={"model_type": "mistral", **text},
        vision_config={"model_type": "pixtral", **eyes, "head_dim": 8, "image_size": 28, "patch_size": 14},
        tie_word_embeddings=False,
        **{name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def seeing_ministral3(**text: Any) -> Any:
    """Ministral 3, a multimodal model, of which only the text part is served."""
    return seeing_mistral(**{**text, "model_type": "ministral3"})


def seeing_qwen3(**text: Any) -> Any:
    """Qwen3-VL, of which only the text part is served."""
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 14}
    eighth = text["head_dim"] // 8
    sections = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2 * eighth, eighth, eighth]}
    return CONFIG_MAPPING["qwen3_vl"](
        text_config={"rope_parameters": sections, **text},
        vision_config={**eyes, "out_hidden_size": text["hidden_size"], "deepstack_visual_indexes": [0]},
        tie_word_embeddings=text.get("tie_word_embeddings", False),
        **{name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def seeing_qwen3_5(**text: Any) -> Any:
    """A multimodal Qwen 3.5, of which only the text part is served."""
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 14}
    return CONFIG_MAPPING["qwen3_5"](
        text_config=text,
        vision_config={**eyes, "out_hidden_size": text["hidden_size"]},
        **{name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


def seeing_qwen3_5_moe(**text: Any) -> Any:
    """A multimodal Qwen 3.5 with experts, of which only the text part is served."""
    values: Any = {**seeing_qwen3_5(**text).to_diff_dict(), "text_config": text}
    return CONFIG_MAPPING["qwen3_5_moe"](**values)


def seeing_llama4(**text: Any) -> Any:
    """A multimodal Llama 4, of which only the text part is served."""
    eyes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    joint = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
    return CONFIG_MAPPING["llama4"](
        text_config=text,
        vision_config={**eyes, **joint, "image_size": 28, "patch_size": 14},
        **{name: text[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )


NAMED_OTHERWISE: dict[str, Any] = {  # families whose name differs from that of their configuration in transformers
    "baichuan": baichuan,
    "baichuan2": baichuan,
    "deepseek_v3": deepseek_v3,
    "falcon": falcon,
    "falcon_rw": falcon,
    "gemma3": CONFIG_MAPPING["gemma3_text"],
    "gemma3_seeing": seeing_gemma3,
    "internlm2": internlm2,
    "llama4": CONFIG_MAPPING["llama4_text"],
    "llama4_seeing": seeing_llama4,
    "ministral3_seeing": seeing_ministral3,
    "mistral_seeing": seeing_mistral,
    "mpt_before": CONFIG_MAPPING["mpt"],
    **{family: CONFIG_MAPPING[twin] for family, (twin, _, _) in PUBLISHED.items()},
    "qwen3_5": CONFIG_MAPPING["qwen3_5_text"],
    "qwen3_seeing": seeing_qwen3,
    "qwen3_5_moe": CONFIG_MAPPING["qwen3_5_moe_text"],
    "qwen3_5_moe_seeing": seeing_qwen3_5_moe,
    "qwen3_5_seeing": seeing_qwen3_5,
}
FAMILIES = (
    *PUBLISHED,
    "arcee", "baichuan", "baichuan2", "bloom", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5",
    "ernie4_5_moe", "exaone4", "falcon", "falcon_rw", "gemma", "gemma2", "gemma3", "gemma3_seeing", "glm", "glm4",
    "glm4_moe", "glm4_moe_lite", "gpt_neox", "gpt_oss", "granite", "granitemoe", "granitemoehybrid",
    "hunyuan_v1_dense", "internlm2", "internlm3", "iquestcoder", "lfm2", "lfm2_moe", "llama", "llama4",
    "llama4_seeing", "minicpm3", "ministral", "ministral3", "ministral3_seeing", "mistral", "mistral_seeing",
    "mixtral", "mpt", "mpt_before", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "phi", "phi3", "qwen2", "qwen2_moe",
    "qwen3", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_seeing", "qwen3_5_seeing", "qwen3_moe", "qwen3_next",
    "qwen3_seeing", "seed_oss", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
CONFIGS: dict[str, Any] = {family: NAMED_OTHERWISE.get(family) or CONFIG_MAPPING[family] for family in FAMILIES}
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,  # large enough to affect logits
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "sliding_window": None,
}
# multimodal families whose text part has its own class
SEEING = {
    "llama4_seeing",
    "ministral3_seeing",
    "mistral_seeing",
    "qwen3_seeing",
    "qwen3_5_seeing",
    "qwen3_5_moe_seeing",
}
PUBLISHED_AS = {  # published architectures that transformers saves under another name, usually Llama's
    "baichuan": "BaiChuanForCausalLM",
    "baichuan2": "BaichuanForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "internlm3": "InternLM3ForCausalLM",
    "iquestcoder": "IQuestCoderForCausalLM",
    "falcon_rw": "RWForCausalLM",
    "mpt_before": "MPTForCausalLM",
}
TWIN = "llama"  # folder with an equivalent checkpoint that transformers can read
FULL, SLIDING = "full_attention", "sliding_attention"
WIDE = {"hidden_size": 64, "head_dim": 16}  # for families whose heads always fill the hidden size
EPS = {"layer_norm_eps": 1e-3}
MIXED = {"sliding_window": 9, "layer_types": [SLIDING, FULL, SLIDING]}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 20}
FACTORS = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.0,
    "residual_multiplier": 0.4,
}
DELTA_NET = {
    "layer_types": ["linear_attention", FULL, "linear_attention"],
    "linear_key_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 10,
}
MPT = {
    "hidden_size": 64,
    "head_dim": 16,
    "layer_norm_epsilon": 1e-3,
    "num_key_value_heads": 4,
    "max_seq_len": 256,
}
FALCON = {"hidden_size": 64, "layer_norm_epsilon": 1e-3}
OWN: dict[str, dict[str, Any]] = {  # configuration fields of single families
    "cohere": {**WIDE, **EPS, "logit_scale": 0.5},
    "cohere2": {**WIDE, **EPS, **MIXED, "logit_scale": 0.5},
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": 20,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
    },
    "bloom": {"hidden_size": 64, "head_dim": 16, "layer_norm_epsilon": 1e-3, "num_key_value_heads": 4},
    "exaone4": MIXED,
    "falcon": FALCON,
    "falcon_rw": {**FALCON, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    "mpt": MPT,
    "mpt_before": MPT,
    "gemma2": {
        "sliding_window": 9,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
        "query_pre_attn_scalar": 5,
    },
    "gemma3": {
        **MIXED,
        "query_pre_attn_scalar": 5,
        "rope_parameters": {
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
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
    "gpt_neox": {**WIDE, **EPS, "num_key_value_heads": 4},
    "gpt_oss": {**LOCAL_EXPERTS, **MIXED},
    "granite": FACTORS,
    "granitemoe": {**LOCAL_EXPERTS, **FACTORS},
    "llama4": {
        "attention_chunk_size": 9,
        "attn_scale": 0.5,
        "floor_scale": 8,
        "interleave_moe_layer_step": 2,
        "intermediate_size": 20,
        "intermediate_size_mlp": 24,
        "no_rope_layers": [1, 0, 1],
        "num_experts_per_tok": 2,
        "num_local_experts": 6,
    },
    "ministral": MIXED,
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.5,
        }
    },
    "mixtral": LOCAL_EXPERTS,
    "nemotron": {"norm_eps": 1e-3},
    "olmo": WIDE,
    "olmo3": {
        **MIXED,
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
    "olmoe": {**WIDE, "intermediate_size": 20, "num_experts_per_tok": 2, "num_experts": 6},
    "phi": {**WIDE, **EPS},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "smollm3": {"use_sliding_window": True, "sliding_window": 9, "no_rope_layers": [1, 0, 1]},
    "stablelm": {**WIDE, **EPS},
    "starcoder2": {**WIDE, "norm_epsilon": 1e-3},
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
    "mamba_chunk_size": 16,  # of transformers; its default of 256 is slow for short prompts
    "shared_intermediate_size": 24,
}
LFM2 = {"norm_eps": 1e-3, "layer_types": ["conv", FULL, "conv"], "conv_bias": True}
OWN["lfm2"] = {**LFM2, "intermediate_size": 70, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 8}
OWN["lfm2_moe"] = {**LFM2, **EXPERTS, "num_dense_layers": 1, "routed_scaling_factor": 1.5}
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
OWN["deepseek_v3"] = LATENT
# The C++ kernels support multiples of 16, including the rotated dimensions.
OWN["glm4_moe_lite"] = {
    **LATENT,
    "kv_lora_rank": 32,
}
OWN["minicpm"] = FACTORS
OWN["minicpm3"] = {
    **{name: value for name, value in LATENT.items() if name not in OWN["glm4_moe"]},
    "dim_model_base": 16,
    "scale_depth": 0.7,
    "scale_emb": 3.0,
}
OWN["deepseek"] = OWN["bailing"] = {
    **EXPERTS,
    "shared_expert_intermediate_size": 40,
    "mlp_only_layers": [0],
    "qkv_bias": False,
}
OWN["bailing"] = {**OWN["bailing"], "norm_topk_prob": True}
OWN["bailing_v2"] = {
    **OWN["glm4_moe"],
    "attention_bias": False,
    "n_shared_experts": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    "use_qk_norm": True,
}
OWN["qwen1"] = {"num_key_value_heads": 4}
OWN["gemma3_seeing"] = OWN["gemma3"]
OWN["ministral3_seeing"] = OWN["ministral3"]
OWN["llama4_seeing"] = OWN["llama4"]


def write(
    directory: Path | str,
    family: str = "llama",
    *,
    vocab_size: int = 128,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    published_names: bool = True,
    **config_overrides: Any,
) -> str:
    """Write a checkpoint without a tokenizer and return its path. Overrides are configuration fields.

    Without `published_names`, tensors have the names and layouts of transformers' modules.
    """
    values = {**SHAPE, **OWN.get(family, {}), **config_overrides}
    if family == "minicpm":  # the published model always has the usual scale of scores
        values["attention_multiplier"] = values["head_dim"] ** -0.5
    config = CONFIGS[family](vocab_size=vocab_size, **values)
    kind = AutoModelForImageTextToText if family in SEEING else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    redraw(model, seed)
    model.to(getattr(torch, dtype))
    if family in PUBLISHED:
        return write_published(Path(directory), family, model)
    tensors: dict[str, Any] = {}
    if family == "internlm2":
        model.save_pretrained(Path(directory) / TWIN)
        tensors["state_dict"] = as_internlm2(model.state_dict(), config.num_key_value_heads)
    if family in ("baichuan", "baichuan2"):
        tensors["state_dict"] = as_baichuan(model.state_dict())
        if family == "baichuan2":
            head = model.get_output_embeddings().weight.data  # the equivalent checkpoint has the normalised vectors
            head.copy_(torch.nn.functional.normalize(head))
        model.save_pretrained(Path(directory) / TWIN)
    model.save_pretrained(directory, max_shard_size=max_shard_size, save_original_format=published_names, **tensors)
    if family in PUBLISHED_AS:
        file = Path(directory) / "config.json"
        saved = json.loads(file.read_text(encoding="utf-8"))
        saved["architectures"] = [PUBLISHED_AS[family]]
        if family == "internlm2":
            saved["bias"] = saved.pop("attention_bias")
        if family == "baichuan2":
            # other checkpoints declare it by their vocabulary size
            saved["unit_head"] = config_overrides.get("unit_head", True)
        file.write_text(json.dumps(saved), encoding="utf-8")
    return str(directory)


def write_published(directory: Path, family: str, model: PreTrainedModel) -> str:
    """Write a checkpoint under the names of its publisher, and the equivalent one that transformers can read."""
    _, architecture, publish = PUBLISHED[family]
    before_saving(family, model)
    model.save_pretrained(directory / TWIN)
    config = json.loads((directory / TWIN / "config.json").read_text(encoding="utf-8"))
    tensors, values = publish(load_file(directory / TWIN / "model.safetensors"), config)
    save_file({name: each.contiguous() for name, each in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**values, "architectures": [architecture]}), encoding="utf-8")
    return str(directory)


def as_baichuan(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert Llama's tensors to Baichuan's published names."""
    found = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in [name for name in found if ".q_proj." in name]:
        parts = [found.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        found[name.replace("q_proj", "W_pack")] = torch.cat(parts)
    return found


def as_internlm2(tensors: dict[str, torch.Tensor], num_groups: int) -> dict[str, torch.Tensor]:
    """Convert Llama's tensors to InternLM 2's published names."""
    names = {
        "model.embed_tokens": "model.tok_embeddings", "lm_head": "output", "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3", "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    found = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            groups = [part.unflatten(0, (num_groups, -1)) for part in parts]
            name, tensor = (
                name.replace("self_attn.q_proj", "attention.wqkv"),
                torch.cat(groups, 1).flatten(0, 1),
            )
        for theirs, own in names.items():
            name = name.replace(theirs, own)
        if "k_proj" not in name and "v_proj" not in name:
            found[name] = tensor.clone()
    return found


def readable(path: str) -> str:
    """Return the checkpoint that transformers can read: the same one, or its equivalent."""
    return f"{path}/{TWIN}" if Path(path, TWIN).is_dir() else path


def cached(family: str = "llama", **arguments: Any) -> str:
    """Like `write`, once per process and set of arguments, in a temporary directory.

    For tests that only read the checkpoint.
    """
    return _write_once(family, json.dumps(arguments, sort_keys=True))


@cache
def _write_once(family: str, arguments: str) -> str:
    return write(Path(_scratch().name) / str(_write_once.cache_info().misses), family, **json.loads(arguments))


@cache
def _scratch() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="tiny-checkpoints-")


def redraw(model: PreTrainedModel, seed: int) -> None:
    """Draw matrices with standard deviation 0.2, and norms and biases clearly different from 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # the neutral value of a norm's weight
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
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))


# transformers 5.24 reads this field of the output of Llama 4's language model, which does not have it.
MoeCausalLMOutputWithPast.image_outputs = None  # pyright: ignore[reportAttributeAccessIssue]


def auto_of(path: str) -> Any:
    """Return transformers' auto class that reads a checkpoint as a generating model."""
    kind = json.loads((Path(path) / "config.json").read_text(encoding="utf-8"))["model_type"]
    return AutoModelForImageTextToText if kind in ("llama4", "mistral3", "qwen3_vl") else AutoModelForCausalLM


def reference(path: str, token_ids: list[int]) -> torch.Tensor:
    """Return the result of transformers: float32 logits [T, V] of one sequence, in one pass.

    Falcon uses torch's attention, because its eager code applies ALiBi's slopes twice.
    """
    config = json.loads((Path(readable(path)) / "config.json").read_text(encoding="utf-8"))
    implementation = "sdpa" if config["model_type"] == "falcon" else "eager"
    model = auto_of(path).from_pretrained(readable(path), dtype=torch.float32, attn_implementation=implementation)
    with torch.no_grad():
        return model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0].float()
