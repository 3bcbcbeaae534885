"""Small configurations of transformers' models without a native family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# Fields that are set if a configuration has them.
SMALL: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "head_dim": 16, "sliding_window": 9,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2,
    "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 256, "rotary_dim": 8,
    "d_model": 64, "n_layers": 2, "n_heads": 4, "ffn_dim": 96, "word_embed_proj_dim": 64, "num_layers": 2,
    "embedding_size": 64,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 16, "q_lora_rank": 24,
}  # fmt: skip
FULL = "full_attention"
_DECODER = {"is_decoder": True}
_HALVES = {"decoder_layers": 2, "decoder_ffn_dim": 96, "decoder_attention_heads": 4, "encoder_ffn_dim": 96}
SLIDING = "sliding_attention"
_GEMMA_3N = {
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128,
}  # fmt: skip
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
OWN: dict[str, dict[str, Any]] = {  # Fields of single kinds, which override SMALL. None removes a field.
    **dict.fromkeys(
        ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
         "rembert", "roberta", "roformer", "xlm-roberta", "xlm-roberta-xl"),
        _DECODER,
    ),
    **dict.fromkeys(
        ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
         "whisper", "trocr"),
        _HALVES,
    ),
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "cpmant": {"dim_ff": 96},
    "ctrl": {"dff": 96},
    "dots1": {"n_shared_experts": 1},
    "falcon": {"head_dim": None},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 9, "num_layers": 2},
    "jamba": {"attn_layer_offset": 1, "attn_layer_period": 2, "mamba_dt_rank": 4},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 128},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 16, "chunk_size": 16},
    "bailing_hybrid": {"layer_types": ["linear_attention", FULL]},
    "lfm2_moe": {"layer_types": ["conv", FULL]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16, "expand": 2, "chunk_size": 16},
    "roc_bert": {**_DECODER, "pronunciation_embed_dim": 16, "pronunciation_vocab_size": 20, "shape_embed_dim": 16,
                 "shape_vocab_size": 20},
    "gemma3n_text": {
        **_GEMMA_3N, "laurel_rank": 8, "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.0] * 4,
    },
    "gemma4_text": {**_GEMMA_3N, "global_head_dim": 16},
    "gemma4_unified_text": {
        **_GEMMA_3N, "global_head_dim": 16, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0,
    },
    "chameleon": {
        "vocabulary_map": {"<image>": 120, "IMGIMGAA": 121},
        "vq_config": {
            "embed_dim": 8, "num_embeddings": 8, "latent_channels": 8, "resolution": 32, "base_channels": 32,
            "channel_multiplier": [1, 1], "num_res_blocks": 1,
        },
    },
    "cohere_compass_text": {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in
                                                (FULL, SLIDING)}},
    "cosmos3_edge_text": {"rope_parameters": _SECTIONS},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"], "num_key_value_heads": 4},
    "emu3": {"vocabulary_map": {"<image>": 120, "<|visual token 000001|>": 121}},
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [32, 16], "moe_num_experts": 4, "moe_k": 2,
        "rope_parameters": {**_SECTIONS, "mrope_section": [3, 3, 2]},
    },
    "granite4_vision": {
        "downsample_rate": "2/4", "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1],
        "qformer_config": {
            "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 64,
        },
    },
    "granite_docling_vision": {"out_hidden_size": 64},
    "hunyuan_vl_text": {"rope_parameters": {**_SECTIONS, "mrope_section": [2, 2, 2, 2]}},
    "inkling2_vision": {"text_hidden_size": 64},
    "molmo2": {
        "adapter_config": {
            "vision_feature_layer": [1, 0], "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
            "head_dim": 16, "intermediate_size": 96, "text_hidden_size": 64,
        }
    },
    "muse_spark_audio": {"num_hidden_layers": 4, "out_hidden_size": 64},
    "muse_spark_vision": {"num_hidden_layers": 4},
    "paddleocr_vl_text": {"rope_parameters": _SECTIONS},
    "radio": {"video_temporal_patch_size": 2},
    "step3p5": {"sliding_window": 9},
    "unlimited_ocr_text": {"num_key_value_heads": 4},
    "git": {
        "vision_config": {
            "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 32, "patch_size": 16,
            "intermediate_size": 16,
        }
    },
    "dots3_note_text": {
        "index_head_dim": 16, "index_n_heads": 4, "index_topk": 256, "shared_experts_intermediate_size": 32,
        "n_routed_experts": 4,
        "layer_types": [SLIDING, "indexed_attention"],
    },
    "prophetnet": {
        "num_hidden_layers": None, "num_encoder_layers": 1, "num_decoder_layers": 2, "num_decoder_attention_heads": 4,
        "decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "num_encoder_attention_heads": 4,
    },
    "qwen4_exp_text": {
        "ngram_vocab_size_base": 500, "layer_types": ["linear_attention", FULL], "indexer_n_heads": 4,
        "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 256, "indexer_compress_ratio": 4,
    },
    "glm4v_moe_text": {"rope_parameters": {**_SECTIONS, "mrope_section": [1, 1, 2]}},
    "glm4v_text": {"rope_parameters": _SECTIONS},
    "glm_ocr_text": {"rope_parameters": _SECTIONS},
    "mistral4": {"head_dim": 16, "num_key_value_heads": 4},
    "qwen2_5_omni_text": {"rope_parameters": _SECTIONS},
    "qwen2_5_vl_text": {"rope_parameters": _SECTIONS},
    "qwen2_vl_text": {"rope_parameters": _SECTIONS},
    "qwen2_vl_vision": {"depth": 2, "embed_dim": 64, "num_heads": 4},
    "qwen3_5_text": {"layer_types": ["linear_attention", FULL]},
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "xmod": {**_DECODER, "default_language": "en_XX"},
    "xlnet": {"max_position_embeddings": None},
    "xlstm": {"v_head_dim": None},
    "roberta-prelayernorm": {**_DECODER, "pad_token_id": 126},  # padding does not affect the positions of this model
    "kimi_linear": {"layer_types": ["linear_attention", FULL]},
    "reformer": {
        **_DECODER, "axial_pos_embds": False, "attn_layers": ["local", "local"], "feed_forward_size": 96,
        "attention_head_size": 16, "local_attn_chunk_length": 64,
    },
    "zamba": {"num_hidden_layers": 6, "attn_layer_offset": 2, "attn_layer_period": 3},
    "zamba2": {
        "n_mamba_heads": 8, "mamba_d_state": 16, "chunk_size": 16, "layers_block_type": ["linear_attention", "hybrid"],
        "head_dim": None, "num_key_value_heads": 4, "adapter_rank": 8,
    },
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def config(model_type: str, small: Mapping[str, Any] = SMALL, **changes: Any) -> Any:
    """Return a small configuration of this kind. `changes` are its fields; None removes a field.

    `small` replaces `SMALL`. A changed part, such as `vision_config`, is a dictionary with fields of the part.
    """
    kind = CONFIG_MAPPING[model_type]
    usual = kind()
    values = {name: value for name, value in small.items() if _has(usual, name)}
    if getattr(usual, "sliding_window", None) is None:
        values.pop("sliding_window", None)
    if "kv_lora_rank" in values:  # each head of latent attention has a key with two parts
        values |= {"num_key_value_heads": 4} | ({"head_dim": 8} if "head_dim" in values else {})
    for name in getattr(kind, "sub_configs_defaults", None) or {}:
        if (part := getattr(usual, name, None)) is not None:
            changed = changes.pop(name) if isinstance(changes.get(name), Mapping) else {}
            values[name] = config(part.model_type, small, **changed).to_dict()
    values |= {**OWN.get(model_type, {}), **changes}
    return kind(**{name: value for name, value in values.items() if value is not None})


def _has(usual: Any, name: str) -> bool:
    try:
        return hasattr(usual, name)
    except RuntimeError:  # the value differs between layers
        return False
