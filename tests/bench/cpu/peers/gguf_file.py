"""Write a random checkpoint as a GGUF file, with the same content as llama.cpp's conversion."""
# pyright: reportMissingImports=false

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ARCHITECTURES = {  # model type -> GGUF architecture
    "llama": "llama",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "granitemoehybrid": "granitehybrid",
}
STATES = ("mamba", "linear_attention")  # kinds of layers with a recurrent state
IN_FLOAT32 = ("norm", "ffn_gate_inp", "ssm_conv1d", "ssm_dt", "ssm_a", "ssm_d")


def write(source: Path, file: Path, form: str) -> None:
    import gguf

    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(str(file), ARCHITECTURES[config["model_type"]], use_temp_file=True)
    describe(writer, config)
    add_tokenizer(writer, source)
    kind = gguf.GGMLQuantizationType.BF16 if form == "bf16" else gguf.GGMLQuantizationType.Q8_0
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if form == "bf16" else gguf.LlamaFileType.MOSTLY_Q8_0)
    for name, weight in tensors(source, config):
        if weight.ndim == 1 or any(part in name for part in IN_FLOAT32):
            writer.add_tensor(name, weight)
        else:
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def describe(writer: Any, config: dict[str, Any]) -> None:
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config.get("shared_intermediate_size") or config["intermediate_size"])
    writer.add_head_count(heads)
    with_states = [kind in STATES for kind in config.get("layer_types") or []]
    writer.add_head_count_kv([0 if it else kv_heads for it in with_states] if any(with_states) else kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope_theta(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(config.get("num_experts") or config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if config["model_type"] == "gemma3_text":
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "granitemoehybrid":
        describe_hybrid(writer, config)


def describe_hybrid(writer: Any, config: dict[str, Any]) -> None:
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    writer.add_ssm_time_step_rank(config["mamba_n_heads"])
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")
    writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])


def rope_theta(config: dict[str, Any]) -> float:
    """Return the base of the rotary embedding, from an older or newer configuration."""
    given = config.get("rope_parameters") or {}
    given = given.get("full_attention", given)
    return config.get("rope_theta") or given.get("rope_theta", 10_000.0)


def add_tokenizer(writer: Any, source: Path) -> None:
    import gguf

    described = json.loads((source / "tokenizer.json").read_text())
    special = {token["id"] for token in described["added_tokens"]}
    ordered = sorted(described["model"]["vocab"].items(), key=lambda pair: pair[1])
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in ordered])
    writer.add_token_types([control if id in special else normal for _, id in ordered])
    merges = described["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(False)


PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "shared_mlp.output_linear": "ffn_down",
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.dt": "ssm_dt",
    "mamba.A_log": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
GEMMA_PARTS = {
    **PARTS,
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
WITHOUT_SUFFIX = ("ssm_a", "ssm_d")


def tensors(source: Path, config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return weights under GGUF's names in float32, with stacked experts and llama.cpp's other changes."""
    change = CHANGES.get(config["model_type"], unchanged)
    parts = GEMMA_PARTS if config["model_type"] == "gemma3_text" else PARTS
    for name, weight in gathered(read_safetensors(source / "model.safetensors")):
        stem, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):  # for example A_log, D or dt_bias
            stem, suffix = (name.removesuffix("_bias"), "bias") if suffix == "dt_bias" else (name, "")
        if stem in WHOLE:
            made, layer = [(WHOLE[stem], weight)], ""
        else:
            layer, part = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem).groups()  # pyright: ignore
            split = part == "shared_mlp.input_linear"
            made = zip(("ffn_gate", "ffn_up"), halves(weight)) if split else [(parts[part], weight)]
            layer = f"blk.{layer}."
        for short, each in made:
            whole = f"{layer}{short}"
            yield (
                (whole if not suffix or short in WITHOUT_SUFFIX else f"{whole}.{suffix}"),
                change(short, each, config),
            )


def halves(weight: Any) -> Any:
    return weight[: len(weight) // 2], weight[len(weight) // 2 :]


def gathered(given: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Stack the experts of a layer in one tensor."""
    import numpy

    experts: dict[str, dict[int, Any]] = {}
    for name, weight in given:
        found = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", name)
        if found is None:
            yield name, weight
        else:
            experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = weight
    for name, each in experts.items():
        yield name, numpy.stack([each[number] for number in range(len(each))])


def unchanged(part: str, weight: Any, config: dict[str, Any]) -> Any:
    return weight


def halves_interleaved(part: str, weight: Any, config: dict[str, Any]) -> Any:
    """Interleave the halves of each head in Llama's q and k."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}.get(part)
    if heads is None:
        return weight
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def norms_from_one(part: str, weight: Any, config: dict[str, Any]) -> Any:
    return weight + 1 if part.endswith("norm") else weight


def states(part: str, weight: Any, config: dict[str, Any]) -> Any:
    import numpy

    if part == "ssm_a":
        return -numpy.exp(weight)[:, None]
    if part == "ssm_d":
        return weight[:, None]
    if part == "ssm_conv1d" and weight.ndim == 3:
        return weight[:, 0]
    return weight.reshape(config["mamba_n_groups"], -1) if part == "ssm_norm" else weight


CHANGES: dict[str, Callable[[str, Any, dict[str, Any]], Any]] = {
    "llama": halves_interleaved,
    "granitemoehybrid": states,  # q and k are interleaved only if they are rotated
    "gemma3_text": norms_from_one,
}


def read_safetensors(file: Path) -> Iterator[tuple[str, Any]]:
    """Return bfloat16 tensors as float32 arrays."""
    import numpy

    data = numpy.memmap(file, numpy.uint8, "r")
    head = int.from_bytes(data[:8].tobytes(), "little")
    for name, entry in json.loads(data[8 : 8 + head].tobytes()).items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is {entry['dtype']}, not BF16")
        first, last = entry["data_offsets"]
        halves = data[8 + head + first : 8 + head + last].view(numpy.uint16)
        yield name, (halves.astype(numpy.uint32) << 16).view(numpy.float32).reshape(entry["shape"])
