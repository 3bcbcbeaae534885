"""Convert the metadata of a GGUF file to config.json and generation_config.json."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runtime.config.gguf_header import GgufHeader, GgufTensor, read_header
from runtime.errors import CheckpointError

ARCHITECTURES = {  # llama.cpp's name -> name in config.json; a "llama" with experts is Mixtral
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt-oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
MIXTRAL = "MixtralForCausalLM"
_VALUES = {  # metadata key without the architecture's prefix -> name in config.json
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_WINDOWED = ("gemma2", "gemma3", "gpt-oss", "phi3")  # architectures whose files state a window
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Tokens that end a turn, in addition to the file's EOS token.
_END_TEXTS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
)
_CONTROL = 3
# (architecture, number of layers) of models that scale scores by hidden_size / heads instead of head_dim.
GEMMA_27B = {
    ("gemma2", 46),
    ("gemma3", 62),
}


def read_gguf_config(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of config.json and generation_config.json.

    Raises CheckpointError if the file cannot be read or its architecture is not supported.
    """
    header = read_header(path)
    return _config(header), _generation(header)


def _config(header: GgufHeader) -> dict[str, Any]:
    name = header.architecture
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"{header.path} has the architecture {name}, which is not supported in GGUF files. Use the model's "
            f"safetensors files. Supported architectures: {', '.join(ARCHITECTURES)}."
        )
    read = {field: header.values[f"{name}.{key}"] for key, field in _VALUES.items() if f"{name}.{key}" in header.values}
    if name not in _WINDOWED or not read.get("sliding_window"):
        read["sliding_window"] = None
    experts = header.values.get(f"{name}.expert_count") or 0
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{header.path} lacks token_embd.weight.")
    config = {
        **read,
        "architectures": [MIXTRAL if name == "llama" and experts else ARCHITECTURES[name]],
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_output.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "dtype": _dtype(header),
        "quantization_config": {"quant_method": "gguf"},
    }
    config |= _heads(header, name)
    if experts:
        dense = [
            layer
            for layer in range(int(read.get("num_hidden_layers") or 0))
            if f"blk.{layer}.ffn_gate_inp.weight" not in header.tensors
        ]
        config |= {
            "num_local_experts": experts,
            "num_experts": experts,
            "mlp_only_layers": dense,
            "norm_topk_prob": name == "qwen3moe",
        }
    if scaling := _rope_scaling(header, name):
        config["rope_scaling"] = scaling
    return config


def _heads(header: GgufHeader, name: str) -> dict[str, Any]:
    """Return head size, rotated part of heads and scaling of scores; for Gemma also the activation."""
    values, config = header.values, {}
    rotated, size = values.get(f"{name}.rope.dimension_count"), values.get(f"{name}.attention.key_length")
    # phi3 files do not state the head size.
    if name == "phi3" and (values.get(f"{name}.attention.head_count") or 0) > 0:
        size = values.get(f"{name}.embedding_length", 0) // values[f"{name}.attention.head_count"]
    if size is not None or rotated is not None:
        config["head_dim"] = size or rotated
    if size and rotated and rotated != size:
        config["partial_rotary_factor"] = rotated / size
    if not name.startswith("gemma"):
        return config
    config["hidden_act"] = config["hidden_activation"] = "gelu_pytorch_tanh"
    if name != "gemma":
        large = (name, values.get(f"{name}.block_count")) in GEMMA_27B
        heads, hidden = (values.get(f"{name}.{part}") for part in ("attention.head_count", "embedding_length"))
        config["query_pre_attn_scalar"] = hidden // heads if large and hidden and heads else config.get("head_dim")
    return config


def _rope_scaling(header: GgufHeader, name: str) -> dict[str, Any] | None:
    values, prefix = header.values, f"{name}.rope.scaling"
    divisors = header.tensors.get("rope_freqs.weight")
    if divisors is not None:  # Llama 3.1's scaling, stored as one divisor per pair of dimensions
        numbers = _floats(divisors)
        context = values.get(f"{name}.context_length")
        same = {"short_factor": numbers, "long_factor": numbers, "factor": 1.0, "attention_factor": 1.0}
        return {"rope_type": "longrope", "original_max_position_embeddings": context, **same}
    factors = [header.tensors.get(f"rope_factors_{kind}.weight") for kind in ("short", "long")]
    short, long = (None if each is None else _floats(each) for each in factors)
    if short is not None and long is not None:
        trained, factor = values.get(f"{prefix}.original_context_length"), values.get(f"{prefix}.attn_factor")
        longrope = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "attention_factor": factor,
        }
        return {**longrope, "original_max_position_embeddings": trained}
    kind = values.get(f"{prefix}.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise CheckpointError(f"{header.path}: the rope scaling {kind} is not supported in GGUF files.")
    scaling = {"rope_type": kind, "factor": values.get(f"{prefix}.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = values.get(f"{prefix}.original_context_length")
        for key, field in (
            ("yarn_beta_fast", "beta_fast"),
            ("yarn_beta_slow", "beta_slow"),
            ("attn_factor", "attention_factor"),
            ("yarn_attn_factor", "attention_factor"),
        ):
            if (value := values.get(f"{prefix}.{key}")) is not None:
                scaling[field] = value
        if name == "gpt-oss":
            scaling["truncate"] = False
    return scaling


def _floats(tensor: GgufTensor) -> list[float]:
    if tensor.kind.name != "F32":
        raise CheckpointError(f"{tensor.file}: rope factors must be F32, not {tensor.kind.name}.")
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.begin)
        return list(struct.unpack(f"<{tensor.shape[0]}f", stream.read(tensor.end - tensor.begin)))


def _dtype(header: GgufHeader) -> str:
    """Return float32 or float16 if all matrices have it, else bfloat16, whose range suffices for quantised weights."""
    kinds = {tensor.kind.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(kinds), "bfloat16")


def _generation(header: GgufHeader) -> dict[str, Any]:
    values = header.values
    tokens, kinds = (values.get(f"tokenizer.ggml.{part}") or [] for part in ("tokens", "token_type"))
    ends = [values[f"tokenizer.ggml.{name}"] for name in _ENDS if f"tokenizer.ggml.{name}" in values]
    ends += [
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and token in _END_TEXTS
    ]
    generation: dict[str, Any] = {"eos_token_id": sorted(set(ends))}
    if (start := values.get("tokenizer.ggml.bos_token_id")) is not None:
        generation["bos_token_id"] = start
    sampling: Mapping[str, Any] = {field: values.get(f"general.sampling.{key}") for key, field in _SAMPLING.items()}
    return generation | {name: value for name, value in sampling.items() if value is not None}
