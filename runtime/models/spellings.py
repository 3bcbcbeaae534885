"""Older and nested forms of config.json, brought into the usual one. Torch-free.

Each function takes what a file says and returns it as `Config` reads it; `Entry.spelling` names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.errors import CheckpointError

LIKE_LLAMA: Mapping[str, Mapping[str, Any]] = {
    "internlm3": {
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
    },
    "iquestcoder": {
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
    },
}
BAICHUAN_2_VOCAB = 125696
SLIDING, FULL = "sliding_attention", "full_attention"


def gemma3(values: Mapping[str, Any]) -> dict[str, Any]:
    """Windows and angles for each kind of layer, and the text part of a model that also sees."""
    read = text_part(values)
    read = windows_by_pattern(read, 6)
    if read.get("rope_parameters") is None:
        scaling = read.pop("rope_scaling", None) or {}
        read["rope_parameters"] = {
            FULL: {"rope_type": "default", **scaling, "rope_theta": read.pop("rope_theta", None) or 1e6},
            SLIDING: {"rope_type": "default", "rope_theta": read.get("rope_local_base_freq") or 1e4},
        }
    return read


def gpt_oss(values: Mapping[str, Any]) -> dict[str, Any]:
    """Its angles are scaled also where nothing is said of them."""
    read = dict(values)
    if read.get("rope_parameters") is None and read.get("rope_scaling") is None:
        read["rope_scaling"] = {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        }
    return read


def llama(values: Mapping[str, Any]) -> dict[str, Any]:
    """Models that transformers computes as Llama, each of which has values of its own where it is silent."""
    return {**LIKE_LLAMA.get(str(values.get("model_type")), {}), **values}


def baichuan(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of both sizes one class is published: that of 13B rotates nothing, and states no `max_position_embeddings`.

    Baichuan 2 is known by its vocabulary.
    """
    read = {"unit_head": values.get("vocab_size") == BAICHUAN_2_VOCAB, **values}
    if read.get("max_position_embeddings") is None and "BaichuanForCausalLM" in read["architectures"]:
        read["alibi"] = True
        read["max_position_embeddings"] = read.get("model_max_length") or 4096
    return read


def falcon(values: Mapping[str, Any]) -> dict[str, Any]:
    """How many heads of keys there are follows from the kind of attention.

    The first files of 40B name no kind, but a `model_type` of their own.
    """
    read = {"new_decoder_architecture": values.get("model_type") == "RefinedWeb", **values}
    named = {"n_embed": "hidden_size", "n_head": "num_attention_heads", "n_head_kv": "num_kv_heads"}
    read |= {usual: read[own] for own, usual in named.items() if read.get(own) is not None}
    heads = read.get("num_attention_heads")
    if read["new_decoder_architecture"]:
        read["num_key_value_heads"] = read.get("num_kv_heads") or heads
    else:
        read["num_key_value_heads"] = 1 if read.get("multi_query", True) else heads
    return read


def mistral3(values: Mapping[str, Any]) -> dict[str, Any]:
    """The text part, which is Mistral's or Ministral 3's: the latter has no window unless it says so."""
    read = text_part(values)
    if read.get("model_type") == "ministral3":
        read.setdefault("sliding_window", None)
        read.setdefault("max_position_embeddings", 262144)
        if read.get("rope_parameters") is None and read.get("rope_scaling") is None:
            scaled = {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            }
            trained = {"original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}
            read["rope_parameters"] = {**scaled, **trained}
    return read


def llama4(values: Mapping[str, Any]) -> dict[str, Any]:
    """The text part; layers that rotate see their chunk alone, which stands where others have a window."""
    read = text_part(values)
    count, interval = read.get("num_hidden_layers"), read.get("no_rope_layer_interval") or 4
    if not read.get("no_rope_layers") and isinstance(count, int) and isinstance(interval, int):
        read["no_rope_layers"] = [int((index + 1) % interval != 0) for index in range(count)]
    if isinstance(read.get("attn_temperature_tuning"), int):  # the first files have a 4
        read["attn_temperature_tuning"] = bool(read["attn_temperature_tuning"])
    kinds, rotates = read.get("layer_types"), read.get("no_rope_layers")
    if kinds is None and isinstance(rotates, list):
        read["layer_types"] = [SLIDING if each else FULL for each in rotates]
    elif isinstance(kinds, list):
        read["layer_types"] = [SLIDING if each == "chunked_attention" else each for each in kinds]
    return read


def cohere2(values: Mapping[str, Any]) -> dict[str, Any]:
    """Windows for all but every fourth layer."""
    return windows_by_pattern(dict(values), 4)


def olmo3(values: Mapping[str, Any]) -> dict[str, Any]:
    """Windows for all but every fourth layer; scaled angles are those of the other layers only."""
    read = windows_by_pattern(dict(values), 4)
    rope = read.get("rope_parameters")
    if rope is None or (FULL not in rope and SLIDING not in rope):
        scaling = {**(rope or {}), **(read.pop("rope_scaling", None) or {})}
        theta = scaling.pop("rope_theta", None) or read.pop("rope_theta", None) or 500000.0
        read["rope_parameters"] = {
            FULL: {"rope_type": "default", **scaling, "rope_theta": theta},
            SLIDING: {"rope_type": "default", "rope_theta": theta},
        }
    return read


def exaone4(values: Mapping[str, Any]) -> dict[str, Any]:
    """Windows for all but every `sliding_window_pattern`-th layer, which may also be spelled "LLLG"."""
    read = dict(values)
    pattern = read.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        if pattern.strip("L") != "G":
            raise CheckpointError(f"config.json: sliding_window_pattern must be like LLLG, not {pattern!r}.")
        read["sliding_window_pattern"] = len(pattern)
    return read if read.get("sliding_window") is None else windows_by_pattern(read, 4)


def qwen3_next(values: Mapping[str, Any]) -> dict[str, Any]:
    """Attention in every `full_attention_interval`-th layer."""
    read = dict(values)
    if read.get("layer_types") is None and isinstance(read.get("num_hidden_layers"), int):
        interval = read.get("full_attention_interval", 4)
        if not isinstance(interval, int) or interval < 1:
            raise CheckpointError(f"config.json: full_attention_interval must be a number, not {interval!r}.")
        number = range(1, read["num_hidden_layers"] + 1)
        read["layer_types"] = ["linear_attention" if index % interval else FULL for index in number]
    return read


def qwen3_5(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same of the text part of a model that also sees."""
    return qwen3_next(text_part(values))


def granitemoehybrid(values: Mapping[str, Any]) -> dict[str, Any]:
    """The kinds of layers by the names that attention and recurrent layers have elsewhere."""
    read = dict(values)
    kinds = read.get("layers_block_type") or read.get("layer_types")
    usual = {"mamba": "linear_attention", "attention": FULL}
    if isinstance(kinds, list):
        read["layer_types"] = [usual.get(each, each) if isinstance(each, str) else each for each in kinds]
    return read


def lfm2(values: Mapping[str, Any]) -> dict[str, Any]:
    """The kinds of layers by the usual names. The first files list those with attention; without a list all have it."""
    read = dict(values)
    kinds, count = read.get("layer_types"), read.get("num_hidden_layers")
    if kinds is None and isinstance(count, int):
        attends = read.get("full_attn_idxs")
        attends = range(count) if attends is None else attends
        if not isinstance(attends, list | range):
            raise CheckpointError(f"config.json: full_attn_idxs must list layers, not {attends!r}.")
        kinds = [FULL if index in attends else "conv" for index in range(count)]
    if isinstance(kinds, list):
        read["layer_types"] = ["linear_attention" if each == "conv" else each for each in kinds]
    return read


def latent(values: Mapping[str, Any]) -> dict[str, Any]:
    """Latent attention, as the cache and its kernels see it: one head of keys, which hold the values too."""
    read = {**values, "num_key_value_heads": 1}
    sizes = [read.get(name, default) for name, default in (("kv_lora_rank", 512), ("qk_rope_head_dim", 64))]
    if all(isinstance(size, int) for size in sizes):
        read["head_dim"] = sum(sizes)
    return read


def text_part(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `text_config` where there is one, with those beside it that it does not have itself."""
    inner = values.get("text_config")
    if not isinstance(inner, Mapping):
        return dict(values)
    outer = {name: value for name, value in values.items() if name not in ("text_config", "vision_config")}
    return {**outer, **inner, "architectures": values.get("architectures")}


def windows_by_pattern(read: dict[str, Any], default: int, *, first: int = 1) -> dict[str, Any]:
    """With `layer_types`: every so-manieth layer, counted from `first`, sees all positions, others have a window."""
    if read.get("layer_types") is None and isinstance(read.get("num_hidden_layers"), int):
        pattern = read.get("sliding_window_pattern") or default
        if not isinstance(pattern, int):
            raise CheckpointError(f"config.json: sliding_window_pattern must be a number, not {pattern!r}.")
        number = range(first, read["num_hidden_layers"] + first)
        read["layer_types"] = [SLIDING if index % pattern else FULL for index in number]
    return read


def roberta(values: Mapping[str, Any]) -> dict[str, Any]:
    """Positions are counted from behind the padding's, so that many of the table's are no text's."""
    read, padding = dict(values), values.get("pad_token_id", 1)
    if isinstance(read.get("max_position_embeddings"), int) and isinstance(padding, int):
        read["skipped_positions"] = padding + 1
        read["max_position_embeddings"] -= padding + 1
    return read


def modernbert(values: Mapping[str, Any]) -> dict[str, Any]:
    """Neighbours alone for all but every third layer, whose angles are others."""
    read = {"sliding_window_pattern": values.get("global_attn_every_n_layers"), **values}
    read = windows_by_pattern(read, 3, first=0)
    if read.get("rope_parameters") is None:
        read["rope_parameters"] = {
            FULL: {"rope_type": "default", "rope_theta": read.get("global_rope_theta") or 160000.0},
            SLIDING: {"rope_type": "default", "rope_theta": read.get("local_rope_theta") or 10000.0},
        }
    return read
