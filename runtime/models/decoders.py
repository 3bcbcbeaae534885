"""Table of decoder architectures. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runtime.modeling.entry import Entry
from runtime.modeling.spellings import FULL, LINEAR
from runtime.models.remote_code import REMOTE_CODE

_BAICHUAN = {"max_position_embeddings": 4096}

_ALIBI = {
    "alibi": True,
    "hidden_act": "gelu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}

_GPT = {
    "layer_norm_epsilon": "rms_norm_eps",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}

# Bloom's checkpoints omit the prefix "transformer.".
_TRANSFORMER = {r"(transformer\.)?(?=(h|ln_f|word_embeddings|word_embeddings_layernorm|blocks|norm_f|wte)\.)": "model."}

_QWEN = {
    "max_position_embeddings": 32768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

_QWEN_EXPERTS = {
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_local_experts": 128,
}

_DELTA_NET = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
}

_GEMMA = {"head_dim": 256, "max_position_embeddings": 8192, "tie_word_embeddings": True}

_GEMMA_2 = {
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

_GEMMA_3 = {
    **_GEMMA,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

_GLM = {
    "attention_bias": True,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5,
}

_GRANITE = {
    "attention_multiplier": 1.0,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "max_position_embeddings": 2048,
    "residual_multiplier": 1.0,
}

_ERNIE = {
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}

_COHERE = {
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}

_MINISTRAL_3 = {"head_dim": 128, "num_key_value_heads": 8, "rms_norm_eps": 1e-5}

_LLAMA_4 = {
    "attention_chunk_size": 8192,
    "attn_scale": 0.1,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "head_dim": 128,
    "interleave_moe_layer_step": 1,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 131072,
    "num_experts_per_tok": 1,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "use_qk_norm": True,
}

_LATENT = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

_GRANITE_EXPERTS: dict[str, str | None] = {  # names in transformers 5
    r"(.*\.block_sparse_moe\.)experts\.gate_up_proj$": r"\1input_linear.weight",
    r"(.*\.block_sparse_moe\.)experts\.down_proj$": r"\1output_linear.weight",
    r"(.*\.block_sparse_moe\.)router\.weight$": r"\1router.layer.weight",
}

_TEXT_PART: dict[str, str | None] = {  # text part of a multimodal model
    r"(model\.)?(vision_tower|vision_model|multi_modal_projector)\.": None,
    r"language_model\.model\.": "model.",
    r"model\.language_model\.": "model.",
    r"language_model\.lm_head\.": "lm_head.",
}

_LFM2: dict[str, Any] = {
    "conv_L_cache": 3,
    "max_position_embeddings": 128000,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}

_LFM2_RENAMED = {"norm_eps": "rms_norm_eps", "tie_embedding": "tie_word_embeddings"}

_LFM2_TENSORS: dict[str, str | None] = {
    r"(model\.)embedding_norm\.": r"\1norm.",
    r"(model\.layers\.\d+\.)operator_norm\.": r"\1input_layernorm.",
    r"(model\.layers\.\d+\.)ffn_norm\.": r"\1post_attention_layernorm.",
    r"(model\.layers\.\d+\.self_attn\.)out_proj\.": r"\1o_proj.",
    r"(model\.layers\.\d+\.self_attn\.[qk]_)layernorm\.": r"\1norm.",
    r"(model\.layers\.\d+\.)feed_forward\.(experts\.\d+\.)?w1\.": r"\1mlp.\2gate_proj.",
    r"(model\.layers\.\d+\.)feed_forward\.(experts\.\d+\.)?w2\.": r"\1mlp.\2down_proj.",
    r"(model\.layers\.\d+\.)feed_forward\.(experts\.\d+\.)?w3\.": r"\1mlp.\2up_proj.",
    r"(model\.layers\.\d+\.)feed_forward\.": r"\1mlp.",
}

_LINEAR_OR_FULL = (LINEAR, FULL)

_LAYER_NORM = {"layer_norm_eps": "rms_norm_eps"}

_QWEN_3_5_EXPERTS = {
    **_DELTA_NET,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}


def _qwen3_5(defaults: Mapping[str, Any]) -> Entry:
    """Return the entry of Qwen 3.5's text model, which MiniCPM-V also has."""
    return Entry(
        "qwen3_next:qwen3_5",
        defaults,
        layer_types=_LINEAR_OR_FULL,
        tensors={
            r"mtp\.": None,
            r"model\.(visual|vision_tower|merger)\.": None,
            r"model\.language_model\.": "model.",
        },
        spelling="qwen3_5",
    )


_QWEN_3_5 = _qwen3_5({**_DELTA_NET, "num_key_value_heads": 4})


_MPT = Entry(
    "mpt",
    _ALIBI,
    renamed={
        **_GPT,
        "d_model": "hidden_size",
        "max_seq_len": "max_position_embeddings",
        "n_heads": "num_attention_heads",
        "n_layers": "num_hidden_layers",
    },
    tensors=_TRANSFORMER,
)

_FALCON = Entry(
    "falcon",
    {**_ALIBI, "alibi": False},
    renamed={**_GPT, "activation": "hidden_act"},
    tensors=_TRANSFORMER,
    spelling="falcon",
)

_ERNIE_4_5 = Entry("ernie4_5:ernie4_5", _ERNIE)

_MIXTRAL = Entry(
    "mistral:mixtral",
    {
        "max_position_embeddings": 131072,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
    },
    tensors={r"(.*\.)mlp\.(gate|experts)\b": r"\1block_sparse_moe.\2"},  # names in transformers 5
)

ARCHITECTURES: Mapping[str, Entry] = {
    **REMOTE_CODE,
    "ArceeForCausalLM": Entry("arcee", {"hidden_act": "relu2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5}),
    "BaiChuanForCausalLM": Entry("baichuan", _BAICHUAN, spelling="baichuan"),
    "BaichuanForCausalLM": Entry("baichuan", _BAICHUAN, spelling="baichuan"),
    "BloomForCausalLM": Entry(
        "bloom",
        {
            **_ALIBI,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 64,
            "num_attention_heads": 8,
            "num_hidden_layers": 2,
        },
        renamed={**_GPT, "n_embed": "hidden_size", "seq_length": "max_position_embeddings"},
        tensors=_TRANSFORMER,
    ),
    "CohereForCausalLM": Entry("cohere:cohere", {**_COHERE, "rope_theta": 500000.0}, renamed=_LAYER_NORM),
    "Cohere2ForCausalLM": Entry(
        "cohere:cohere2", {**_COHERE, "sliding_window": 4096}, renamed=_LAYER_NORM, spelling="cohere2"
    ),
    "DeepseekV2ForCausalLM": Entry(
        "deepseek:deepseek_v2",
        defaults={
            **_LATENT,
            "first_k_dense_replace": 0,
            "max_position_embeddings": 2048,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "routed_scaling_factor": 1.0,
        },
        spelling="latent",
    ),
    "DeepseekV3ForCausalLM": Entry(
        "deepseek:deepseek_v3",
        defaults={
            **_LATENT,
            "first_k_dense_replace": 3,
            "max_position_embeddings": 4096,
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "routed_scaling_factor": 2.5,
            "topk_group": 4,
        },
        spelling="latent",
    ),
    "Ernie4_5ForCausalLM": _ERNIE_4_5,
    "Ernie4_5_ForCausalLM": _ERNIE_4_5,  # name in the model's own code
    "Ernie4_5_MoeForCausalLM": Entry(
        "ernie4_5:ernie4_5_moe",
        {
            "max_position_embeddings": 131072,
            "moe_layer_interval": 1,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 2,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        renamed={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
        tensors={
            r"model\.mtp_": None,  # multi-token prediction layers are not loaded
            r"(.*\.mlp\.)gate\.moe_statics\.": r"\1moe_statics.",  # names in transformers 5
        },
    ),
    "Exaone4ForCausalLM": Entry(
        "exaone4",
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096},
        spelling="exaone4",
    ),
    "FalconForCausalLM": _FALCON,
    "GemmaForCausalLM": Entry("gemma:gemma", {**_GEMMA, "hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 16}),
    "Gemma2ForCausalLM": Entry("gemma:gemma2", {**_GEMMA, **_GEMMA_2}),
    "Gemma3ForCausalLM": Entry("gemma:gemma3", _GEMMA_3, spelling="gemma3"),
    "Gemma3ForConditionalGeneration": Entry(
        "gemma:gemma3",
        {**_GEMMA_3, "vocab_size": 262208},
        tensors=_TEXT_PART,
        spelling="gemma3",
    ),
    "Glm4ForCausalLM": Entry("glm:glm4", {**_GLM, "rms_norm_eps": 1.5625e-07}),
    "Glm4MoeForCausalLM": Entry(
        "glm:glm4_moe",
        {
            "first_k_dense_replace": 1,
            "max_position_embeddings": 131072,
            "n_group": 1,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 8,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
        },
    ),
    "Glm4MoeLiteForCausalLM": Entry(
        "deepseek:deepseek_v3",
        defaults={
            **_LATENT,
            "first_k_dense_replace": 1,
            "max_position_embeddings": 202752,
            "moe_intermediate_size": 1536,
            "n_group": 1,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.8,
            "topk_group": 1,
            "v_head_dim": 256,
        },
        spelling="latent",
    ),
    "GlmForCausalLM": Entry("glm:glm", {**_GLM, "rms_norm_eps": 1.5625e-07}),
    "GPTNeoXForCausalLM": Entry(
        "gpt_neox",
        {
            "attention_bias": True,
            "hidden_act": "gelu",
            "max_position_embeddings": 2048,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-5,
        },
        renamed={
            **_LAYER_NORM,
            "rotary_emb_base": "rope_theta",
            "rotary_pct": "partial_rotary_factor",
        },
        tensors={
            r"embed_out\.": "lm_head.",
            r"(gpt_neox\.)?layers\.\d+\.attention\.(masked_)?bias$": None,  # stored causal masks, not biases
            r"gpt_neox\.": "model.",
        },
    ),
    "GptOssForCausalLM": Entry(
        "gpt_oss",
        {
            "attention_bias": True,
            "head_dim": 64,
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
        },
        sinks=True,
        spelling="gpt_oss",
    ),
    "GraniteForCausalLM": Entry("granite:granite", _GRANITE),
    "GraniteMoeForCausalLM": Entry(
        "granite:granitemoe",
        {**_GRANITE, "num_experts_per_tok": 2, "num_local_experts": 8},
        tensors=_GRANITE_EXPERTS,
    ),
    "GraniteMoeHybridForCausalLM": Entry(
        "granite:granitemoehybrid",
        {
            **_GRANITE,
            "mamba_d_conv": 4,
            "mamba_d_state": 256,
            "mamba_expand": 2,
            "mamba_n_groups": 1,
            "mamba_n_heads": 128,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "shared_intermediate_size": 1024,
        },
        layer_types=_LINEAR_OR_FULL,
        tensors={
            r"(model\.layers\.\d+\.shared_mlp\.)output_linear\.": r"\1down_proj.",
            **_GRANITE_EXPERTS,
        },
        spelling="granitemoehybrid",
    ),
    "HunYuanDenseV1ForCausalLM": Entry("hunyuan_v1_dense", {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}),
    "IQuestCoderForCausalLM": Entry("llama", spelling="llama"),
    "InternLM2ForCausalLM": Entry(
        "internlm2",
        {"attention_bias": True, "max_position_embeddings": 2048},
        renamed={"bias": "attention_bias"},
        tensors={
            r"model\.tok_embeddings\.": "model.embed_tokens.",
            r"output\.": "lm_head.",
            r"(model\.layers\.\d+\.)attention\.wo\.": r"\1self_attn.o_proj.",
            r"(model\.layers\.\d+\.)attention\.wqkv\.": r"\1self_attn.wqkv.",
            r"(model\.layers\.\d+\.)attention_norm\.": r"\1input_layernorm.",
            r"(model\.layers\.\d+\.)ffn_norm\.": r"\1post_attention_layernorm.",
            r"(model\.layers\.\d+\.)feed_forward\.w1\.": r"\1mlp.gate_proj.",
            r"(model\.layers\.\d+\.)feed_forward\.w2\.": r"\1mlp.down_proj.",
            r"(model\.layers\.\d+\.)feed_forward\.w3\.": r"\1mlp.up_proj.",
        },
    ),
    "InternLM3ForCausalLM": Entry(
        "llama",
        {"head_dim": 128, "max_position_embeddings": 32768, "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
        renamed={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    ),
    "Lfm2ForCausalLM": Entry(
        "lfm2:lfm2",
        {
            **_LFM2,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_multiple_of": 256,
        },
        layer_types=_LINEAR_OR_FULL,
        renamed={**_LFM2_RENAMED, "block_ff_dim": "intermediate_size"},
        tensors=_LFM2_TENSORS,
        spelling="lfm2",
    ),
    "Lfm2MoeForCausalLM": Entry(
        "lfm2:lfm2_moe",
        {
            **_LFM2,
            "moe_intermediate_size": 1792,
            "norm_topk_prob": True,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "routed_scaling_factor": 1.0,
            "use_expert_bias": True,
        },
        layer_types=_LINEAR_OR_FULL,
        renamed=_LFM2_RENAMED,
        tensors=_LFM2_TENSORS,
        spelling="lfm2",
    ),
    "Llama4ForCausalLM": Entry("llama4", _LLAMA_4, tensors=_TEXT_PART, spelling="llama4"),
    "Llama4ForConditionalGeneration": Entry("llama4", _LLAMA_4, tensors=_TEXT_PART, spelling="llama4"),
    "LlamaForCausalLM": Entry("llama", {"max_position_embeddings": 2048}, spelling="llama"),
    "MinistralForCausalLM": Entry(
        "mistral:mistral",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "MistralForCausalLM": Entry(
        "mistral:mistral",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "MiniCPM3ForCausalLM": Entry(
        "granite:minicpm3",
        defaults={
            "kv_lora_rank": 256,
            "max_position_embeddings": 32768,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "rms_norm_eps": 1e-5,
            "rope_interleave": False,
            "tie_word_embeddings": True,
        },
        spelling="minicpm3",
    ),
    "MiniCPMOcrForConditionalGeneration": _QWEN_3_5,
    "MiniCPMV4_6ForConditionalGeneration": _QWEN_3_5,
    "MiniCPMV4_7ForConditionalGeneration": _QWEN_3_5,
    "Ministral3ForCausalLM": Entry("mistral:mistral", _MINISTRAL_3, spelling="mistral3"),
    "Mistral3ForConditionalGeneration": Entry(
        "mistral:mistral",
        {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
        tensors=_TEXT_PART,
        spelling="mistral3",
    ),
    "MixtralForCausalLM": _MIXTRAL,
    "MPTForCausalLM": _MPT,  # name in the model's own code
    "MptForCausalLM": _MPT,
    "NemotronForCausalLM": Entry(
        "nemotron",
        {
            "hidden_act": "relu2",
            "max_position_embeddings": 4096,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
        },
        renamed={"norm_eps": "rms_norm_eps", "rope_percent": "partial_rotary_factor"},
    ),
    "OlmoForCausalLM": Entry("olmo:olmo", {"max_position_embeddings": 2048}),
    "Olmo2ForCausalLM": Entry("olmo:olmo2", {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5}),
    "Olmo3ForCausalLM": Entry(
        "olmo:olmo3",
        {"max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "sliding_window": 4096},
        spelling="olmo3",
    ),
    "OlmoeForCausalLM": Entry(
        "olmo:olmoe",
        {
            "max_position_embeddings": 4096,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "rms_norm_eps": 1e-5,
        },
        renamed={"num_local_experts": "num_experts"},
    ),
    "PhiForCausalLM": Entry(
        "phi:phi",
        {
            "hidden_act": "gelu_new",
            "max_position_embeddings": 2048,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
        },
        renamed=_LAYER_NORM,
    ),
    "Phi3ForCausalLM": Entry(
        "phi:phi3",
        {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ),
    "QuantMixtralForCausalLM": _MIXTRAL,  # name of quantised checkpoints
    "Qwen2ForCausalLM": Entry("qwen2:qwen2", _QWEN),
    "Qwen2MoeForCausalLM": Entry(
        "qwen2:qwen2_moe",
        {
            **_QWEN,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 1408,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 16,
            "shared_expert_intermediate_size": 5632,
        },
        renamed={"num_local_experts": "num_experts"},
    ),
    "Qwen3ForCausalLM": Entry("qwen3:qwen3", {**_QWEN, "head_dim": 128}),
    "Qwen3VLForConditionalGeneration": Entry(
        "qwen3:qwen3",
        {**_QWEN, "head_dim": 128, "max_position_embeddings": 128000, "rope_theta": 5000000.0},
        tensors={r"model\.visual\.": None, r"model\.language_model\.": "model."},
        spelling="qwen3_vl",
    ),
    "Qwen3NextForCausalLM": Entry(
        "qwen3_next:qwen3_next",
        {
            **_DELTA_NET,
            "decoder_sparse_step": 1,
            "moe_intermediate_size": 512,
            "norm_topk_prob": True,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "num_key_value_heads": 2,
            "shared_expert_intermediate_size": 512,
        },
        layer_types=_LINEAR_OR_FULL,
        tensors={r"mtp\.": None},  # multi-token prediction layers are not loaded
        spelling="qwen3_next",
    ),
    "Qwen3_5ForCausalLM": _qwen3_5({**_DELTA_NET, "num_key_value_heads": 4}),
    "Qwen3_5ForConditionalGeneration": _QWEN_3_5,
    "Qwen3_5MoeForCausalLM": _qwen3_5(_QWEN_3_5_EXPERTS),
    "Qwen3_5MoeForConditionalGeneration": _qwen3_5(_QWEN_3_5_EXPERTS),
    "Qwen3MoeForCausalLM": Entry("qwen3:qwen3_moe", {**_QWEN, **_QWEN_EXPERTS, "num_key_value_heads": 4}),
    "RWForCausalLM": _FALCON,  # the architecture's name before transformers supported it
    "SeedOssForCausalLM": Entry(
        "seed_oss",
        {
            "attention_bias": True,
            "head_dim": 128,
            "max_position_embeddings": 524288,
            "num_key_value_heads": 8,
        },
    ),
    "StableLmForCausalLM": Entry(
        "stablelm",
        {
            "max_position_embeddings": 4096,
            "num_key_value_heads": 32,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-5,
        },
        renamed={**_LAYER_NORM, "rope_pct": "partial_rotary_factor"},
    ),
    "Starcoder2ForCausalLM": Entry(
        "starcoder2",
        {
            "hidden_act": "gelu_pytorch_tanh",
            "max_position_embeddings": 4096,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "use_bias": True,
        },
        renamed={"norm_epsilon": "rms_norm_eps"},
    ),
    "SmolLM3ForCausalLM": Entry(
        "smollm3",
        {
            "max_position_embeddings": 32768,
            "num_key_value_heads": 4,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
        },
    ),
}
