"""Table of decoders whose checkpoints come with Python files, because transformers lacks the class.

Penstock does not run these files; native families compute the same models. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from runtime.modeling.entry import Entry

_BAILING: dict[str, str | None] = {
    r"model\.word_embeddings\.": "model.embed_tokens.",
    r"(model\.layers\.\d+\.)attention\.dense\.": r"\1self_attn.o_proj.",
    r"(model\.layers\.\d+\.)attention\.": r"\1self_attn.",
}

_CHATGLM = Entry(
    "glm:chatglm",
    {"add_qkv_bias": False, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5},
    renamed={
        "ffn_hidden_size": "intermediate_size",
        "kv_channels": "head_dim",
        "layernorm_epsilon": "rms_norm_eps",
        "num_layers": "num_hidden_layers",
        "padded_vocab_size": "vocab_size",
        "seq_length": "max_position_embeddings",
    },
    tensors={
        r"transformer\.embedding\.word_embeddings\.": "model.embed_tokens.",
        r"transformer\.encoder\.final_layernorm\.": "model.norm.",
        r"transformer\.output_layer\.": "lm_head.",
        r"transformer\.rotary_pos_emb\.": None,
        r"transformer\.encoder\.(layers\.\d+\.)self_attention\.dense\.": r"model.\1self_attn.o_proj.",
        r"transformer\.encoder\.(layers\.\d+\.)self_attention\.": r"model.\1self_attn.",
        r"transformer\.encoder\.(layers\.\d+\.)mlp\.dense_4h_to_h\.": r"model.\1mlp.down_proj.",
        r"transformer\.encoder\.": "model.",
    },
    spelling="chatglm",
)

REMOTE_CODE: Mapping[str, Entry] = {
    "BailingMoeForCausalLM": Entry(
        "bailing:bailing",
        {
            "first_k_dense_replace": 0,
            "max_position_embeddings": 16384,
            "norm_topk_prob": True,
            "num_experts_per_tok": 6,
            "num_shared_experts": 0,
            "rms_norm_eps": 1e-5,
        },
        tensors=_BAILING,
    ),
    "BailingMoeV2ForCausalLM": Entry(
        "bailing:bailing_v2",
        {
            "first_k_dense_replace": 0,
            "max_position_embeddings": 16384,
            "n_group": 8,
            "num_experts_per_tok": 8,
            "num_shared_experts": 1,
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
        },
        tensors={
            r"(model\.layers\.\d+\.)attention\.query_layernorm\.": r"\1self_attn.q_norm.",
            r"(model\.layers\.\d+\.)attention\.key_layernorm\.": r"\1self_attn.k_norm.",
            **_BAILING,
        },
    ),
    "ChatGLMForConditionalGeneration": _CHATGLM,
    "ChatGLMModel": _CHATGLM,
    "DeciLMForCausalLM": Entry("nemotron_nas", {"max_position_embeddings": 2048}, spelling="nemotron_nas"),
    "DeepseekForCausalLM": Entry(
        "deepseek:deepseek",
        {
            "first_k_dense_replace": 0,
            "max_position_embeddings": 2048,
            "moe_intermediate_size": 1407,
            "moe_layer_freq": 1,
            "n_shared_experts": 0,
        },
    ),
    "ExaoneForCausalLM": Entry(
        "llama",
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
        renamed={
            "activation_function": "hidden_act",
            "layer_norm_epsilon": "rms_norm_eps",
            "num_layers": "num_hidden_layers",
        },
        tensors={
            r"transformer\.wte\.": "model.embed_tokens.",
            r"transformer\.ln_f\.": "model.norm.",
            r"transformer\.h\.(\d+\.)ln_1\.": r"model.layers.\1input_layernorm.",
            r"transformer\.h\.(\d+\.)ln_2\.": r"model.layers.\1post_attention_layernorm.",
            r"transformer\.h\.(\d+\.)attn\.attention\.out_proj\.": r"model.layers.\1self_attn.o_proj.",
            r"transformer\.h\.(\d+\.)attn\.attention\.": r"model.layers.\1self_attn.",
            r"transformer\.h\.(\d+\.)mlp\.c_fc_0\.": r"model.layers.\1mlp.gate_proj.",
            r"transformer\.h\.(\d+\.)mlp\.c_fc_1\.": r"model.layers.\1mlp.up_proj.",
            r"transformer\.h\.(\d+\.)mlp\.c_proj\.": r"model.layers.\1mlp.down_proj.",
        },
    ),
    "MiMoForCausalLM": Entry(
        "qwen2:qwen2",
        {
            "max_position_embeddings": 32768,
            "max_window_layers": 28,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "use_sliding_window": False,
        },
        tensors={r"model\.mtp_layers\.": None},  # multi-token prediction layers are not loaded
    ),
    "MiniCPMForCausalLM": Entry(
        "granite:granite", {"max_position_embeddings": 2048, "tie_word_embeddings": True}, spelling="minicpm"
    ),
    "QWenLMHeadModel": Entry(
        "qwen2:qwen1",
        {"no_bias": True},
        renamed={
            "kv_channels": "head_dim",
            "layer_norm_epsilon": "rms_norm_eps",
            "rotary_emb_base": "rope_theta",
            "rotary_pct": "partial_rotary_factor",
        },
        tensors={
            r"transformer\.wte\.": "model.embed_tokens.",
            r"transformer\.ln_f\.": "model.norm.",
            r"transformer\.h\.(\d+\.)ln_1\.": r"model.layers.\1input_layernorm.",
            r"transformer\.h\.(\d+\.)ln_2\.": r"model.layers.\1post_attention_layernorm.",
            r"transformer\.h\.(\d+\.)attn\.c_proj\.": r"model.layers.\1self_attn.o_proj.",
            r"transformer\.h\.(\d+\.)attn\.": r"model.layers.\1self_attn.",
            r"transformer\.h\.(\d+\.)mlp\.w1\.": r"model.layers.\1mlp.up_proj.",
            r"transformer\.h\.(\d+\.)mlp\.w2\.": r"model.layers.\1mlp.gate_proj.",
            r"transformer\.h\.(\d+\.)mlp\.c_proj\.": r"model.layers.\1mlp.down_proj.",
            r"transformer\.rotary_emb\.": None,
        },
        spelling="qwen1",
    ),
    "XverseForCausalLM": Entry("llama", {"max_position_embeddings": 2048}),
}
