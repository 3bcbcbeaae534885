"""Write ordinary checkpoints as GGUF files, with llama.cpp's package and like its converter."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import tiny_checkpoints

NAMES = {  # model_type -> llama.cpp's architecture
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gpt_oss": "gpt-oss",
    "phi3": "phi3",
}
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
MOE = {
    "qwen3_moe": {"moe_intermediate_size": 64},
    "qwen2_moe": {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64},
}
VECTOR = "shared_expert_gate.weight"  # a matrix with one row, which GGUF stores as a vector
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")


def write(directory: Path, family: str, kind: str, **config: Any) -> tuple[str, str]:
    """Write a GGUF file of a tiny model with this type of matrices, and an ordinary checkpoint with equal values.
    Return both paths.
    """
    values = {**SHAPE, **MOE.get(family, {}), **config}
    return convert(Path(tiny_checkpoints.cached(family, **values)), directory, kind)


def convert(
    source: Path, directory: Path, kind: str, *, split: bool = False, experts: str = "stacked"
) -> tuple[str, str]:
    """Like `write`, for a given checkpoint in one file. If it has a byte-level tokenizer.json, write that too.

    Experts are "stacked", "fused" (gate and up in one tensor) or "apart" (one tensor each, as in files from 2023).
    """
    config = json.loads((source / "config.json").read_text())
    directory.mkdir(parents=True, exist_ok=True)
    path, architecture = directory / "model.gguf", NAMES[config["model_type"]]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=12 if split else 0)
    _describe(writer, config, architecture)
    if (source / "tokenizer.json").is_file():
        _add_tokenizer(writer, source, config)
    tensors = load_file(source / "model.safetensors")
    plain = {name: _held(name, tensor, kind) for name, tensor in tensors.items()}
    for name, stored in _placed(_gguf_tensors(tensors, config, architecture), experts).items():
        if stored.ndim == 1:
            writer.add_tensor(name, stored)
        else:
            number = Kind[kind]
            writer.add_tensor(name, gguf.quantize(stored, number), raw_dtype=number)
    if (config.get("rope_scaling") or config.get("rope_parameters") or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _divisors(source))
    for reach in ("short", "long"):
        if factors := (config.get("rope_parameters") or {}).get(f"{reach}_factor"):
            writer.add_tensor(f"rope_factors_{reach}.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made = directory / "plain"
    made.mkdir()
    for file in source.glob("*.json"):
        shutil.copy(file, made)
    save_file(plain, made / "model.safetensors", {"format": "pt"})
    (made / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    return str(directory / "model-00001-of-00003.gguf" if split else path), str(made)


def _placed(tensors: dict[str, np.ndarray], experts: str) -> dict[str, np.ndarray]:
    made = {}
    for name, stored in tensors.items():
        if "_exps." not in name or experts == "stacked":
            made[name] = stored
        elif experts == "apart":
            made |= {name.replace("_exps.", f".{number}."): each for number, each in enumerate(stored)}
        elif "_gate_exps." in name:
            up = tensors[name.replace("gate", "up")]
            made[name.replace("gate", "gate_up")] = np.concatenate([stored, up], axis=1)
        elif "_down_exps." in name:
            made[name] = stored
    return made


def _held(name: str, tensor: torch.Tensor, kind: str) -> torch.Tensor:
    if tensor.dim() == 1 or name.endswith(VECTOR):
        return tensor.float()
    number = Kind[kind]
    return torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.float().numpy(), number), number).copy())


def _gguf_tensors(tensors: dict[str, torch.Tensor], config: dict[str, Any], architecture: str) -> dict[str, np.ndarray]:
    names = gguf.get_tensor_name_map(
        next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture),
        config["num_hidden_layers"],
    )
    experts: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    found = {}
    for name, tensor in _split_experts(tensors) if architecture == "gpt-oss" else tensors.items():
        values = tensor.float().numpy()
        if expert := _EXPERT.fullmatch(name):
            experts[f"{expert[1]}.{expert[3]}.weight"][int(expert[2])] = values
            continue
        if architecture == "llama" and (part := re.search(r"\.([qk])_proj\.", name)):
            heads = config["num_attention_heads" if part[1] == "q" else "num_key_value_heads"]
            values = values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        found[_name(names, name)] = values[0] if name.endswith(VECTOR) else values
    for name, each in experts.items():
        found[_name(names, name)] = np.stack([each[number] for number in range(len(each))])
    return found


def _split_experts(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Split gpt-oss's alternating rows of gate and up into two tensors, with inputs last."""
    for name, tensor in tensors.items():
        prefix, together, kind = name.rpartition("experts.")
        if not together:
            yield f"{name}.weight" if name.endswith("sinks") else name, tensor
            continue
        kind, suffix = (kind[:-5], "bias") if kind.endswith("_bias") else (kind, "weight")
        rows = tensor if suffix == "bias" else tensor.mT
        parts = {"gate_proj": rows[:, ::2], "up_proj": rows[:, 1::2]} if "gate" in kind else {kind: rows}
        for part, each in parts.items():
            yield f"{prefix}experts.{part}.{suffix}", each.contiguous()


def _name(names: gguf.TensorNameMap, name: str) -> str:
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise ValueError(f"llama.cpp has no name for {name}")
    return found


def _describe(writer: gguf.GGUFWriter, config: dict[str, Any], architecture: str) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if architecture != "phi3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    whole = rope.get("full_attention", rope)
    writer.add_rope_freq_base(whole.get("rope_theta") or config.get("rope_theta") or 10000.0)
    if whole.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(whole["factor"])
    if whole.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(whole["factor"])
        writer.add_rope_scaling_orig_ctx_len(whole["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_attn_factor(whole["attention_factor"])
        writer.add_rope_scaling_yarn_beta_fast(whole["beta_fast"])
    if whole.get("rope_type") == "longrope":
        trained = config["original_max_position_embeddings"]
        longer = config["max_position_embeddings"] / trained
        writer.add_rope_scaling_orig_ctx_len(trained)
        writer.add_rope_scaling_attn_factors((1 + np.log(longer) / np.log(trained)) ** 0.5)
    if config.get("sliding_window") and architecture.startswith(("gemma", "gpt-oss", "phi3")):
        writer.add_sliding_window(config["sliding_window"])
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(name):
            getattr(writer, f"add_{name}")(config[name])
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if config.get("moe_intermediate_size"):
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        if config.get("shared_expert_intermediate_size"):
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def _divisors(source: Path) -> np.ndarray:
    config = AutoConfig.from_pretrained(source)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    size, base = len(scaled) * 2, config.rope_parameters["rope_theta"]
    plain = 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    return (plain / scaled).numpy()


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path, config: dict[str, Any]) -> None:
    described = json.loads((source / "tokenizer.json").read_text())
    settings = json.loads((source / "tokenizer_config.json").read_text())
    tokens: dict[int, tuple[str, gguf.TokenType]] = {
        number: (token, gguf.TokenType.NORMAL) for token, number in described["model"]["vocab"].items()
    }
    for each in described["added_tokens"]:
        kind = gguf.TokenType.CONTROL if each["special"] else gguf.TokenType.USER_DEFINED
        tokens[each["id"]] = (each["content"], kind)
    absent = (f"[PAD{number}]" for number in range(config["vocab_size"]))
    ordered = [tokens.get(number, (text, gguf.TokenType.UNUSED)) for number, text in enumerate(absent)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(config.get("split", "gpt-2"))
    writer.add_token_list([token for token, _ in ordered])
    writer.add_token_types([kind for _, kind in ordered])
    merges = described["model"]["merges"]
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in merges])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    if isinstance(settings.get("chat_template"), str):
        writer.add_chat_template(settings["chat_template"])


_CONVERTER = """
import runpy, sys
folder = sys.argv.pop(1)
sys.path[:0] = [folder, f"{folder}/gguf-py"]
from conversion import base

def without_pieces(*given):  # it asks for sentencepiece before it looks whether there is a file for it
    raise FileNotFoundError

base.TextModel._create_vocab_sentencepiece = without_pieces
base.TextModel.get_vocab_base_pre = lambda model, tokenizer: "gpt-2"  # it knows those of published models alone
runpy.run_path(f"{folder}/convert_hf_to_gguf.py", run_name="__main__")
"""


def by_converter(llama_cpp: str, source: str, path: Path) -> str:
    """Write a bfloat16 GGUF file with llama.cpp's converter. `llama_cpp` is the folder of its sources."""
    options = [source, "--outfile", str(path), "--outtype", "bf16"]
    subprocess.run([sys.executable, "-c", _CONVERTER, llama_cpp, *options], check=True, capture_output=True)
    return str(path)


def by_llama_cpp(whole: str, path: Path, kind: str) -> str:
    """Write a GGUF file with llama.cpp's quantiser, for example "Q4_K_M". Raises ImportError if it is not installed."""
    import llama_cpp  # pyright: ignore[reportMissingImports]

    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if llama_cpp.llama_model_quantize(whole.encode(), str(path).encode(), options):
        raise RuntimeError(f"llama.cpp cannot write {kind}")
    return str(path)
