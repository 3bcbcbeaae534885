"""Functions that convert older and nested forms of config.json to the usual form. Does not import torch.

Each function maps the values of a file to the values that `Config` reads. `Entry.spelling` names the function.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.config.fields import Fields
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
LINEAR = "linear_attention"  # kind of the recurrent layers of every family


def gemma3(values: Mapping[str, Any]) -> dict[str, Any]:
    """Select the text model, and set the window and the rotary embedding of each kind of layer."""
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
    """Add the default YaRN scaling to files without rope parameters."""
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
    """Add the defaults of other model types that use Llama's architecture."""
    return {**LIKE_LLAMA.get(str(values.get("model_type")), {}), **values}


def baichuan(values: Mapping[str, Any]) -> dict[str, Any]:
    """Set the fields in which Baichuan's models differ.

    7B and 13B share class names. 13B is recognised by its missing `max_position_embeddings`, and uses ALiBi. Baichuan 2
    is recognised by its vocabulary size.
    """
    read = {"unit_head": values.get("vocab_size") == BAICHUAN_2_VOCAB, **values}
    if read.get("max_position_embeddings") is None and "BaichuanForCausalLM" in read["architectures"]:
        read["alibi"] = True
        read["max_position_embeddings"] = read.get("model_max_length") or 4096
    return read


def falcon(values: Mapping[str, Any]) -> dict[str, Any]:
    """Set `num_key_value_heads` from the kind of attention.

    The first files of Falcon 40B have the `model_type` "RefinedWeb" instead of `new_decoder_architecture`.
    """
    read = {"new_decoder_architecture": values.get("model_type") == "RefinedWeb", **values}
    renamed = {"n_embed": "hidden_size", "n_head": "num_attention_heads", "n_head_kv": "num_kv_heads"}
    read |= {usual: read[name] for name, usual in renamed.items() if read.get(name) is not None}
    heads = read.get("num_attention_heads")
    if read["new_decoder_architecture"]:
        read["num_key_value_heads"] = read.get("num_kv_heads") or heads
    else:
        read["num_key_value_heads"] = 1 if read.get("multi_query", True) else heads
    return read


def mistral3(values: Mapping[str, Any]) -> dict[str, Any]:
    """Select the text model: Mistral, or Ministral 3, whose window and rope scaling have other defaults."""
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
    """Select the text model. Layers with rotary embedding, which attend within chunks, become sliding layers."""
    read = text_part(values)
    count, interval = read.get("num_hidden_layers"), read.get("no_rope_layer_interval") or 4
    if not read.get("no_rope_layers") and isinstance(count, int) and isinstance(interval, int):
        read["no_rope_layers"] = [int((index + 1) % interval != 0) for index in range(count)]
    if isinstance(read.get("attn_temperature_tuning"), int):  # the first files have 4 instead of true
        read["attn_temperature_tuning"] = bool(read["attn_temperature_tuning"])
    kinds, rotates = read.get("layer_types"), read.get("no_rope_layers")
    if kinds is None and isinstance(rotates, list):
        read["layer_types"] = [SLIDING if each else FULL for each in rotates]
    elif isinstance(kinds, list):
        read["layer_types"] = [SLIDING if each == "chunked_attention" else each for each in kinds]
    return read


def cohere2(values: Mapping[str, Any]) -> dict[str, Any]:
    """Set `layer_types`: every fourth layer has full attention, the other layers have a window."""
    return windows_by_pattern(dict(values), 4)


def olmo3(values: Mapping[str, Any]) -> dict[str, Any]:
    """Set `layer_types`: every fourth layer has full attention and rope scaling, the other layers have a window."""
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
    """Set `layer_types` if the model has a window.

    Every `sliding_window_pattern`-th layer has full attention, the other layers have the window. The pattern "LLLG"
    means 4.
    """
    read = dict(values)
    pattern = read.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        if pattern.strip("L") != "G":
            raise CheckpointError(
                f"config.json: sliding_window_pattern must be an integer or like LLLG, not {pattern!r}."
            )
        read["sliding_window_pattern"] = len(pattern)
    return read if read.get("sliding_window") is None else windows_by_pattern(read, 4)


def qwen3_next(values: Mapping[str, Any]) -> dict[str, Any]:
    """Set `layer_types`: every `full_attention_interval`-th layer has attention; the other layers are recurrent."""
    read = dict(values)
    if read.get("layer_types") is None and isinstance(read.get("num_hidden_layers"), int):
        interval = read.get("full_attention_interval", 4)
        if not isinstance(interval, int) or interval < 1:
            raise CheckpointError(f"config.json: full_attention_interval must be a positive integer, not {interval!r}.")
        number = range(1, read["num_hidden_layers"] + 1)
        read["layer_types"] = [LINEAR if index % interval else FULL for index in number]
    return read


def qwen3_5(values: Mapping[str, Any]) -> dict[str, Any]:
    """Select the text model and convert it like Qwen3-Next."""
    return qwen3_next(_with_interleaved_axes(text_part(values)))


def granitemoehybrid(values: Mapping[str, Any]) -> dict[str, Any]:
    """Translate the kinds of layers to the usual names."""
    read = dict(values)
    kinds = read.get("layers_block_type") or read.get("layer_types")
    usual = {"mamba": LINEAR, "attention": FULL}
    if isinstance(kinds, list):
        read["layer_types"] = [usual.get(each, each) if isinstance(each, str) else each for each in kinds]
    return read


def lfm2(values: Mapping[str, Any]) -> dict[str, Any]:
    """Set `layer_types`. The first files list the attention layers in `full_attn_idxs`.

    If both fields are missing, all layers have attention.
    """
    read = dict(values)
    kinds, count = read.get("layer_types"), read.get("num_hidden_layers")
    if kinds is None and isinstance(count, int):
        attention = read.get("full_attn_idxs")
        attention = range(count) if attention is None else attention
        if not isinstance(attention, list | range):
            raise CheckpointError(f"config.json: full_attn_idxs must be a list of layers, not {attention!r}.")
        kinds = [FULL if index in attention else "conv" for index in range(count)]
    if isinstance(kinds, list):
        read["layer_types"] = [LINEAR if each == "conv" else each for each in kinds]
    return read


def latent(values: Mapping[str, Any]) -> dict[str, Any]:
    """Set the KV cache's sizes for latent attention: one KV head, whose keys contain the values."""
    read = {**values, "num_key_value_heads": 1}
    sizes = [read.get(name, default) for name, default in (("kv_lora_rank", 512), ("qk_rope_head_dim", 64))]
    if all(isinstance(size, int) for size in sizes):
        read["head_dim"] = sum(sizes)
    return read


def minicpm(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the scales of MiniCPM (arXiv 2404.06395) to Granite's multipliers."""
    if values.get("num_experts"):
        raise CheckpointError("config.json: MiniCPM with experts (num_experts) is not supported.")
    if values.get("sparse_config"):
        raise CheckpointError(
            "config.json: sparse attention (sparse_config) of MiniCPM 4 is not supported. Remove sparse_config to "
            "compute dense attention, as for prompts of up to 8,192 tokens."
        )
    read = dict(values)
    fields = Fields(values, "config.json: ")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    depth, base = fields.optional_number("scale_depth"), fields.optional_number("dim_model_base")
    read["attention_multiplier"] = (fields.optional_integer("head_dim") or hidden // heads) ** -0.5
    read["embedding_multiplier"] = fields.optional_number("scale_emb") or 1.0
    read["logits_scaling"] = hidden / (base or 1.0)
    read["residual_multiplier"] = (depth or 1.0) / fields.integer("num_hidden_layers") ** 0.5
    return read


def minicpm3(values: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the scales of MiniCPM 3 to Granite's multipliers, and set the size of the cache.

    Fields that are missing have the values of MiniCPM3-4B, as in transformers.
    """
    ranks = {"kv_lora_rank": 256, "qk_rope_head_dim": 32}
    scales = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256}
    read = {**ranks, **scales, **values}
    fields = Fields(read, "config.json: ")
    hidden, depth = fields.integer("hidden_size"), fields.integer("num_hidden_layers")
    for name, usual in (("scale_depth", depth**0.5), ("dim_model_base", hidden)):  # null: without effect
        read[name] = fields.optional_number(name) or usual
    if read.get("v_head_dim") is None:
        read["v_head_dim"] = hidden // fields.integer("num_attention_heads")
    return latent(minicpm(read))


def qwen1(values: Mapping[str, Any]) -> dict[str, Any]:
    """Set the context length to the trained length, and halve `intermediate_size`, which counts gate and up together.

    Beyond the trained length, Qwen 1 scales its queries and its rotary embedding. This scaling is not supported.
    """
    fields = Fields(values, "config.json: ")
    inner = fields.integer("intermediate_size") // 2
    return {
        **values,
        "intermediate_size": inner,
        "max_position_embeddings": fields.optional_integer("seq_length") or 2048,
    }


def chatglm(values: Mapping[str, Any]) -> dict[str, Any]:
    """Set `num_key_value_heads` and `rope_theta`.

    Raises CheckpointError for ChatGLM 1, and for variants of the layer that no published model has.
    """
    if "position_encoding_2d" in values or "padded_vocab_size" not in values:
        raise CheckpointError(
            "config.json: ChatGLM of the first generation has positions of two axes and a bidirectional prompt, which "
            "are not supported. Use ChatGLM 2 or 3, or GLM-4."
        )
    fields = Fields(values, "config.json: ")
    for name, usual in (
        ("rmsnorm", True),
        ("post_layer_norm", True),
        ("apply_residual_connection_post_layernorm", False),
        ("add_bias_linear", False),
    ):
        if fields.flag(name, default=usual) != usual:
            raise CheckpointError(f"config.json: {name} {not usual} is not supported.")
    if fields.optional_integer("pre_seq_len", low=0):
        raise CheckpointError("config.json: pre_seq_len (a trained prefix) is not supported.")
    grouped = fields.flag("multi_query_attention")
    kv_heads = fields.integer("multi_query_group_num" if grouped else "num_attention_heads")
    theta = 10000.0 * (fields.optional_number("rope_ratio") or 1.0)
    return {**values, "num_key_value_heads": kv_heads, "rope_theta": theta}


def nemotron_nas(values: Mapping[str, Any]) -> dict[str, Any]:
    """Set `num_key_value_heads`. Raises CheckpointError if the number differs between layers with attention."""
    blocks, heads = values.get("block_configs"), values.get("num_attention_heads")
    count = Fields(values, "config.json: ").integer("num_hidden_layers")
    if not isinstance(blocks, list) or not all(isinstance(each, Mapping) for each in blocks) or len(blocks) != count:
        raise CheckpointError(
            f"config.json: block_configs must be a list of {count} objects. DeciLM without this list is not supported."
        )
    attentions = [Fields(each, "config.json: block_configs: ").child("attention") for each in blocks]
    groups = {each.integer("n_heads_in_group") for each in attentions if not each.flag("no_op")}
    if len(groups) != 1 or not isinstance(heads, int) or heads % min(groups):
        raise CheckpointError(
            "config.json: block_configs: n_heads_in_group must be the same in all layers with attention, and divide "
            "num_attention_heads."
        )
    return {**values, "num_key_value_heads": heads // min(groups)}


def text_part(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `text_config`, with outer values for missing fields, or all values without `text_config`."""
    inner = values.get("text_config")
    if not isinstance(inner, Mapping):
        return dict(values)
    outer = {name: value for name, value in values.items() if name not in ("text_config", "vision_config")}
    return {**outer, **inner, "architectures": values.get("architectures")}


def qwen3_vl(values: Mapping[str, Any]) -> dict[str, Any]:
    """Select the text model, and set `mrope_interleaved`."""
    return _with_interleaved_axes(text_part(values))


def _with_interleaved_axes(read: dict[str, Any]) -> dict[str, Any]:
    """Set `mrope_interleaved` in the rope parameters: transformers' modules interleave axes even without this field."""
    for name in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := read.get(name), Mapping) and rope.get("mrope_section") is not None:
            read[name] = {**rope, "mrope_interleaved": True}
    return read


def windows_by_pattern(read: dict[str, Any], default: int, *, first: int = 1) -> dict[str, Any]:
    """Set `layer_types` if it is missing: every n-th layer has full attention, the other layers a window.

    n is `sliding_window_pattern` or, if it is missing, `default`. Layers are counted from `first`.
    """
    if read.get("layer_types") is None and isinstance(read.get("num_hidden_layers"), int):
        pattern = read.get("sliding_window_pattern") or default
        if not isinstance(pattern, int):
            raise CheckpointError(f"config.json: sliding_window_pattern must be an integer, not {pattern!r}.")
        number = range(first, read["num_hidden_layers"] + first)
        read["layer_types"] = [SLIDING if index % pattern else FULL for index in number]
    return read


def roberta(values: Mapping[str, Any]) -> dict[str, Any]:
    """Skip the first rows of the position table: positions count from the row after the padding token's id."""
    read, padding = dict(values), values.get("pad_token_id", 1)
    if isinstance(read.get("max_position_embeddings"), int) and isinstance(padding, int):
        read["skipped_positions"] = padding + 1
        read["max_position_embeddings"] -= padding + 1
    return read


def modernbert(values: Mapping[str, Any]) -> dict[str, Any]:
    """Set the rope parameters and `layer_types`.

    Every `global_attn_every_n_layers`-th layer (default 3) has full attention, the other layers have a window.
    """
    read = {"sliding_window_pattern": values.get("global_attn_every_n_layers"), **values}
    read = windows_by_pattern(read, 3, first=0)
    if read.get("rope_parameters") is None:
        read["rope_parameters"] = {
            FULL: {"rope_type": "default", "rope_theta": read.get("global_rope_theta") or 160000.0},
            SLIDING: {"rope_type": "default", "rope_theta": read.get("local_rope_theta") or 10000.0},
        }
    return read
