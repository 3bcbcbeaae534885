"""Configurations of every family, and for each the changes that must break it."""

from __future__ import annotations

from typing import Any, NamedTuple

from model_mutations import (
    LATENT,
    NETS,
    Mutate,
    drop,
    each,
    halves,
    mamba,
    no_embedding_scale,
    no_eps,
    no_final_cap,
    no_out_bias,
    no_post_norms,
    no_qk_norm,
    no_qkv_bias,
    no_window,
    plain_norm,
    put,
    rotated,
    rotated_as_llama,
    route,
    same_rope,
    short,
    turned_head,
    uncorrected,
    unnormed_heads,
    unshared,
    without_gates,
)
from runtime.modeling.decoder import Decoder


class Variant(NamedTuple):
    """A configuration, and the changes to the model or to its configuration that must break it."""

    family: str
    config: dict[str, Any] = {}
    mutations: dict[str, Mutate] = {}
    overrides: dict[str, dict[str, Any]] = {}
    context_length: int | None = None


def rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **values}}


UNSCALED = {"scaling": rope("default")}
FULL, SLIDING = "full_attention", "sliding_attention"
WINDOWS = {"use_sliding_window": True, "sliding_window": 7}


def longrope(trained: int) -> dict[str, Any]:
    factors = {"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.0, 2.0, 3.0, 5.0]}
    return rope("longrope", original_max_position_embeddings=trained, **factors)


SCALED = {
    "embedding scale": no_embedding_scale,
    "1 + weight": put("attention_norm", unit_offset=False),
    "1 + weight at the end": lambda model: setattr(model.norm, "unit_offset", False),
    "activation": put("mlp", activation="silu"),
}
FUSED = {"qkv in one tensor": each("attention.qkv", lambda linear: linear.weight[32:48].zero_())}

NO_BIAS = {
    "qkv bias": no_qkv_bias,
    "out bias": no_out_bias,
    "up bias": each("mlp.up", lambda linear: linear.bias.zero_()),
    "down bias": each("mlp.down", lambda linear: linear.bias.zero_()),
}
CENTRED = {"norm": plain_norm, "norm's bias": each("attention_norm", lambda norm: norm.bias.zero_())}
PARTIAL = rope("default", partial_rotary_factor=1.0)


def no_logits_scale(model: Decoder) -> None:
    head: Any = model.head
    head.scale = None


def no_head_bias(model: Decoder) -> None:
    head: Any = model.head
    head.bias = None


VARIANTS = {
    "bailing": Variant(
        "bailing",
        mutations={"shared experts": unshared, "renormalisation": route(renormalise=False)},
        overrides={"unit head": {"norm_head": False}},
    ),
    "bailing_v2": Variant(
        "bailing_v2",
        mutations={
            "groups": route(grouping=None),
            "sigmoid": route(scoring="softmax"),
            "scale": route(scale=1.0),
            "correction": uncorrected,
            "shared experts": unshared,
            "qk norm": no_qk_norm,
        },
        overrides={"partial rotation": {"partial_rotary_factor": 1.0}},
    ),
    "chatglm": Variant(
        "chatglm",
        {"attention_bias": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5e4}},
        {"qkv bias": no_qkv_bias, "neighbours": halves},
        {"base of angles": {"rope_ratio": 1.0}, "partial rotation": {"partial_rotary_factor": 1.0}},
    ),
    "deepseek": Variant("deepseek", mutations={"shared experts": unshared, "renormalisation": route(renormalise=True)}),
    "exaone": Variant(
        "exaone", {"tie_word_embeddings": True}, {"tie": turned_head}, {"activation": {"activation_function": "gelu"}}
    ),
    "mimo": Variant("mimo", mutations={"qkv bias": no_qkv_bias}),
    "minicpm": Variant(
        "minicpm",
        mutations={"scale of logits": no_logits_scale, "embedding scale": no_embedding_scale},
        overrides={"depth": {"scale_depth": 1.0}, "width": {"dim_model_base": 8}},
    ),
    "minicpm3": Variant(
        "minicpm3",
        mutations={"scale of logits": no_logits_scale, "embedding scale": no_embedding_scale},
        overrides={
            "depth": {"scale_depth": 1.0},
            "width": {"dim_model_base": 8},
            "neighbours": {"rope_interleave": True},
        },
    ),
    "nemotron_nas": Variant("nemotron_nas"),
    "qwen1": Variant("qwen1", mutations={"qkv bias": no_qkv_bias}, overrides={"base": {"rotary_emb_base": 5e5}}),
    "xverse": Variant("xverse", overrides={"scaling": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}}),
    "arcee": Variant("arcee", mutations={"square": put("mlp", activation="relu")}),
    "arcee-biases": Variant("arcee", {"attention_bias": True, "mlp_bias": True}, NO_BIAS),
    "cohere": Variant(
        "cohere",
        mutations={"neighbours": halves, "scale of logits": no_logits_scale, "norm": plain_norm},
    ),
    "cohere-qk-norm": Variant("cohere", {"use_qk_norm": True}, {"qk norm": no_qk_norm}),
    "cohere2": Variant(
        "cohere2",
        mutations={"window": no_window, "no rotation": rotated, "scale of logits": no_logits_scale},
    ),
    "deepseek_v2": Variant("deepseek_v2", mutations={**LATENT, "groups": route(grouping=None)}),
    "deepseek_v2-lite": Variant("deepseek_v2", {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": Variant(
        "deepseek_v3",
        {"attention_bias": True},
        {
            **LATENT,
            "groups": route(grouping=None),
            "correction": uncorrected,
            "renormalisation": route(renormalise=False),
            "bias of latent vectors": each("attention.latents", lambda linear: linear.bias.zero_()),
        },
    ),
    "deepseek_v3-yarn": Variant(
        "deepseek_v3",
        rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=0.7, mscale_all_dim=1.2),
        {"scale": put("attention", scale=14**-0.5)},
        UNSCALED,
    ),
    "glm4_moe_lite": Variant(
        "glm4_moe_lite", {"n_group": 1, "topk_group": 1}, {"shared experts": unshared, "neighbours": halves}
    ),
    "ernie4_5_moe": Variant(
        "ernie4_5_moe",
        mutations={
            "neighbours": halves,
            "correction": uncorrected,
            "shared experts": unshared,
            "renormalisation": route(renormalise=False),
        },
    ),
    "ernie4_5_moe-some-layers": Variant(
        "ernie4_5_moe",
        {"use_bias": True, "moe_num_shared_experts": 0, "moe_layer_end_index": 1},
        {"qkv bias": no_qkv_bias},
    ),
    "gemma3-seeing": Variant("gemma3_seeing", mutations={"window": no_window}),
    "glm4_moe": Variant(
        "glm4_moe",
        mutations={
            "groups": route(grouping=None),
            "sigmoid": route(scoring="softmax"),
            "scale": route(scale=1.0),
            "renormalisation": route(renormalise=False),
            "correction": uncorrected,
            "shared experts": unshared,
        },
        overrides={"partial rotation": PARTIAL},
    ),
    "glm4_moe-355b": Variant(
        "glm4_moe",
        {"use_qk_norm": True, "attention_bias": True, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
        {"qk norm": no_qk_norm, "qkv bias": no_qkv_bias, "renormalisation": route(renormalise=True)},
    ),
    "granitemoe": Variant(
        "granitemoe",
        mutations={
            "second expert": route(top_k=1),
            "renormalisation": route(renormalise=False),
            "scale of scores": put("attention", scale=8**-0.5),
            "halves": each("mlp", lambda mlp: mlp.gate_up.copy_(mlp.gate_up.flip(1))),
        },
    ),
    "gpt_neox": Variant(
        "gpt_neox",
        mutations={**CENTRED, **NO_BIAS, "norm of the MLP": drop("mlp_norm")},
        overrides={"partial rotation": PARTIAL, "in parallel": {"use_parallel_residual": False}},
    ),
    "gpt_neox-in-turn": Variant(
        "gpt_neox",
        {"use_parallel_residual": False, "attention_bias": False},
        {"activation": put("mlp", activation="silu")},
        {"in turn": {"use_parallel_residual": True}},
    ),
    "bloom": Variant(
        "bloom",
        mutations={
            **CENTRED,
            **NO_BIAS,
            "slopes": put("attention", slopes=None),
            "order of slopes": each("attention", lambda x: setattr(x, "slopes", x.slopes.flip(0))),
            "norm of embeddings": lambda model: setattr(model, "embedding_norm", None),
            "activation": put("mlp", activation="silu"),
        },
    ),
    "bloom-six-heads": Variant(
        "bloom",
        {"hidden_size": 48, "head_dim": 8, "num_attention_heads": 6, "num_key_value_heads": 6},
        {"slopes between": each("attention", lambda x: x.slopes[4:].mul_(0.5))},
    ),
    "falcon": Variant(
        "falcon", mutations={**CENTRED, "values": each("attention.qkv", lambda x: x.weight[-9:].zero_())}
    ),
    "falcon-40b": Variant(
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "bias": True, "ffn_hidden_size": 80},
        {**CENTRED, **NO_BIAS, "norm of the MLP": drop("mlp_norm"), "rotation": put("attention", rope=None)},
    ),
    "falcon-11b": Variant(
        "falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}, CENTRED
    ),
    "falcon-rw": Variant(
        "falcon_rw",
        mutations={**CENTRED, **NO_BIAS, "slopes": put("attention", slopes=None)},
        overrides={"slopes": {"alibi": False}},
    ),
    "mpt": Variant(
        "mpt",
        mutations={
            "norm": plain_norm,
            "slopes": put("attention", slopes=None),
            "activation": put("mlp", activation="silu"),
        },
    ),
    "mpt-before": Variant("mpt_before"),
    "mpt-scaled": Variant(
        "mpt",
        {"attn_config": {"softmax_scale": 0.3}},
        overrides={
            "scale": {"attn_config": {}},
            "slopes": {"attn_config": {"softmax_scale": 0.3, "alibi_bias_max": 4}},
        },
    ),
    "nemotron": Variant(
        "nemotron",
        mutations={
            **CENTRED,
            "1 + weight": each("attention_norm", lambda norm: norm.weight.sub_(1)),
            "square": put("mlp", activation="relu"),
        },
        overrides={"partial rotation": PARTIAL},
    ),
    "nemotron-biases": Variant("nemotron", {"attention_bias": True, "mlp_bias": True}, NO_BIAS),
    "olmo": Variant(
        "olmo",
        mutations={"norm": each("attention_norm", lambda norm: norm.weight.fill_(2))},
    ),
    "olmo-biases": Variant("olmo", {"attention_bias": True}, {"qkv bias": no_qkv_bias}),
    "phi": Variant(
        "phi",
        mutations={**CENTRED, **NO_BIAS, "bias of logits": no_head_bias},
        overrides={"partial rotation": PARTIAL},
    ),
    "phi-qk-norm": Variant("phi", {"qk_layernorm": True}, {"qk norm": no_qk_norm}),
    "stablelm": Variant("stablelm", mutations=CENTRED, overrides={"partial rotation": PARTIAL}),
    "stablelm-2-12b": Variant(
        "stablelm",
        {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
        {"qk norm": no_qk_norm, "qkv bias": no_qkv_bias},
    ),
    "starcoder2": Variant("starcoder2", {"sliding_window": 7}, {**CENTRED, **NO_BIAS, "window": no_window}),
    "starcoder2-no-biases": Variant("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "gemma": Variant("gemma", mutations=SCALED),
    "gemma-untied-one-kv-head": Variant("gemma", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "gemma-biases": Variant("gemma", {"attention_bias": True}, {"qkv bias": no_qkv_bias, "out bias": no_out_bias}),
    "gemma2": Variant(
        "gemma2",
        {},
        {
            **SCALED,
            "scale of its own": put("attention", scale=8**-0.5),
            "cap on scores": put("attention", soft_cap=None),
            "cap on logits": no_final_cap,
            "window": no_window,
            "alternation": put("attention", window=9),
            "norm behind attention": lambda model: [
                setattr(layer, "post_attention_norm", None) for layer in model.layers
            ],
            "norm behind the MLP": lambda model: [setattr(layer, "post_mlp_norm", None) for layer in model.layers],
        },
    ),
    "gemma2-layer-types": Variant(
        "gemma2",
        {"layer_types": [FULL, SLIDING, SLIDING]},
        {"layer_types": put("attention", window=None)},
    ),
    "gemma2-no-caps": Variant(
        "gemma2",
        {"attn_logit_softcapping": None, "final_logit_softcapping": None},
        overrides={"cap on scores": {"attn_logit_softcapping": 2.0}},
    ),
    "ernie4_5": Variant("ernie4_5", mutations={"neighbours": halves}),
    "ernie4_5-biases": Variant("ernie4_5", {"use_bias": True}, {"qkv bias": no_qkv_bias, "out bias": no_out_bias}),
    "exaone4": Variant(
        "exaone4",
        mutations={
            "window": no_window,
            "qk norm": no_qk_norm,
            "norms behind": no_post_norms,
            "no rotation": rotated,
        },
    ),
    "exaone4-no-window": Variant("exaone4", {"sliding_window": None, "layer_types": [FULL] * 3}),
    "gemma3": Variant(
        "gemma3",
        mutations={
            "qk norm": no_qk_norm,
            "1 + weight of qk norm": put("attention.q_norm", unit_offset=False),
            "window": no_window,
            "scale of its own": put("attention", scale=8**-0.5),
            "angles of their own": lambda model: same_rope(model, 0, 1),
        },
    ),
    "glm": Variant(
        "glm",
        {"attention_bias": True},
        {"neighbours": halves, "qkv bias": no_qkv_bias},
        {"partial rotation": rope("default", partial_rotary_factor=1.0)},
    ),
    "glm4": Variant(
        "glm4",
        mutations={
            "neighbours": halves,
            "norm behind attention": drop("post_attention_norm"),
            "norm behind the MLP": drop("post_mlp_norm"),
        },
    ),
    "granitemoehybrid": Variant(
        "granitemoehybrid",
        mutations={
            "no rotation": rotated_as_llama,
            "second expert": route(top_k=1),
            "shared MLP": put("mlp", shared=None),
            "convolution": mamba(lambda layer: layer.convolution.weight[:-1].zero_()),
            "bias of the convolution": mamba(lambda layer: layer.convolution.bias.zero_()),
            "decay": mamba(lambda layer: layer.rate.fill_(-9)),
            "skip": mamba(lambda layer: layer.skip.zero_()),
            "norm": mamba(lambda layer: layer.norm_weight.fill_(1)),
            "groups of the norm": mamba(lambda layer: setattr(layer, "groups", 1)),
        },
        overrides={"limits": {"time_step_limit": [0.5, 0.6]}},
    ),
    "granitemoehybrid-dense": Variant(
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_proj_bias": True,
            "mamba_n_groups": 1,
        },
        {"rotation": put("attention", rope=None)},
    ),
    "lfm2": Variant(
        "lfm2",
        mutations={
            "qk norm": unnormed_heads,
            "eps": no_eps,
            "gate before the convolution": without_gates(0),
            "gate behind the convolution": without_gates(1),
            "convolution": short(lambda layer: layer.convolution.weight[:-1].zero_()),
            "bias of the convolution": short(lambda layer: layer.convolution.bias.zero_()),
            "bias of projections": short(lambda layer: layer.projections.bias.zero_()),
            "bias behind": short(lambda layer: layer.out.bias.zero_()),
            "tie": turned_head,
        },
        overrides={"rotation": rope("default")},
    ),
    # The format of the first files: numbers of the attention layers, and a longer convolution.
    "lfm2-first": Variant(
        "lfm2",
        {
            "layer_types": None,
            "full_attn_idxs": [2],
            "conv_L_cache": 5,
            "conv_bias": False,
            "tie_word_embeddings": False,
            **rope("default", rope_theta=500.0),
        },
        overrides={"rotation": rope("default")},
    ),
    "lfm2-as-it-says": Variant(
        "lfm2", {"block_auto_adjust_ff_dim": False, "layer_types": None}, {"qk norm": unnormed_heads}
    ),
    "lfm2_moe": Variant(
        "lfm2_moe",
        mutations={
            "correction": uncorrected,
            "second expert": route(top_k=1),
            "renormalisation": route(renormalise=False),
            "scale of experts": route(scale=1.0),
            "sigmoid": route(scoring="softmax"),
        },
    ),
    "lfm2_moe-uncorrected": Variant(
        "lfm2_moe",
        {"use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0},
        {"renormalisation": route(renormalise=True)},
    ),
    "gpt_oss": Variant(
        "gpt_oss",
        mutations={
            "sinks": put("attention", sinks=None),
            "window": no_window,
            "gate": put("mlp", activation="silu"),
            "second expert": route(top_k=1),
            "gate and up bias": put("mlp", gate_up_bias=None),
            "down bias": put("mlp", down_bias=None),
            "router bias": each("mlp.router", lambda linear: linear.bias.zero_()),
            "out bias": no_out_bias,
        },
    ),
    "granite": Variant(
        "granite",
        mutations={
            "embedding scale": no_embedding_scale,
            "scale of scores": put("attention", scale=8**-0.5),
            "multiplier": lambda model: [setattr(layer, "multiplier", 1.0) for layer in model.layers],
            "scale of logits": lambda model: setattr(model.head, "scale", None),
        },
    ),
    "hunyuan_v1_dense": Variant(
        "hunyuan_v1_dense",
        mutations={"qk norm": no_qk_norm, "norm after rotation": put("attention", norm_last=False)},
    ),
    "hunyuan_v1_dense-alpha": Variant(
        "hunyuan_v1_dense",
        rope("dynamic", factor=1.0, alpha=100.0),
        overrides={"alpha": rope("dynamic", factor=1.0)},
    ),
    "internlm3": Variant(
        "internlm3",
        {"attention_bias": True, "mlp_bias": True},
        {"qkv bias": no_qkv_bias, "down bias": each("mlp.down", lambda linear: linear.bias.zero_())},
    ),
    "ministral": Variant("ministral", mutations={"window": no_window, "alternation": put("attention", window=9)}),
    "mixtral": Variant("mixtral", mutations={"renormalisation": route(renormalise=False)}),
    "olmoe": Variant("olmoe", mutations={"qk norm": no_qk_norm, "renormalisation": route(renormalise=True)}),
    "qwen2_moe": Variant(
        "qwen2_moe",
        mutations={
            "qkv bias": no_qkv_bias,
            "shared expert": put("mlp", shared=None),
            "gate of the shared expert": put("mlp", shared_gate=None),
            "renormalisation": route(renormalise=True),
        },
    ),
    "olmo2": Variant("olmo2", mutations={"qk norm": no_qk_norm, "norms behind": no_post_norms}),
    "olmo3": Variant(
        "olmo3",
        mutations={
            "window": no_window,
            "qk norm": no_qk_norm,
            "scaled angles": lambda model: same_rope(model, 1, 0),
        },
    ),
    "seed_oss": Variant("seed_oss", {"attention_out_bias": True}, {"qkv bias": no_qkv_bias, "out bias": no_out_bias}),
    "smollm3": Variant("smollm3", mutations={"window": no_window, "no rotation": rotated}),
    "phi3": Variant("phi3", mutations={**FUSED, "norm": plain_norm, "eps": no_eps}),
    "phi3-tied": Variant("phi3", {"tie_word_embeddings": True}, {"tie": turned_head}),
    "phi3-window": Variant("phi3", {"sliding_window": 7}, {"window": no_window}),
    "phi3-partial-rotation": Variant(
        "phi3",
        rope("default", partial_rotary_factor=0.5),
        overrides={"partial rotation": rope("default")},
    ),
    "phi3-longrope-short": Variant(
        "phi3",
        {**longrope(64), "original_max_position_embeddings": 64},
        overrides=UNSCALED,
        context_length=64,
    ),
    "phi3-longrope-long": Variant("phi3", {**longrope(16), "original_max_position_embeddings": 16}, overrides=UNSCALED),
    "phi3-longrope-partial": Variant(
        "phi3",
        {
            **rope(
                "longrope",
                partial_rotary_factor=0.5,
                short_factor=[1.0, 1.3],
                long_factor=[1.5, 4.0],
                original_max_position_embeddings=16,
            ),
            "original_max_position_embeddings": 16,
        },
        overrides=UNSCALED,
    ),
    "llama": Variant(
        "llama",
        mutations={"norm": plain_norm, "eps": no_eps, "scale": put("attention", scale=0.3)},
        overrides={"theta": {"rope_theta": 2000.0}},
    ),
    "llama4": Variant(
        "llama4",
        mutations={
            "chunks": no_window,
            "chunks, not windows": put("attention", chunked=False),
            "no rotation": rotated,
            "neighbours": lambda model: setattr(model.layers[0].get_submodule("attention.rope"), "interleaved", False),
            "qk norm": no_qk_norm,
            "scale of queries": put("attention", query_scale=None),
            "weights of inputs": route(weigh_inputs=False),
            "second expert": route(top_k=1),
            "sigmoid": route(scoring="softmax"),
            "shared expert": unshared,
        },
        overrides={"plain layers": {"attention_chunk_size": 10}, "floor": {"floor_scale": 16}},
    ),
    "llama4-maverick": Variant(
        "llama4",
        {
            "interleave_moe_layer_step": 1,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "attention_bias": True,
            "num_experts_per_tok": 1,
            "no_rope_layers": None,
            "num_hidden_layers": 4,
            **rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=64,
            ),
        },
        {"qkv bias": no_qkv_bias, "weights of inputs": route(weigh_inputs=False)},
        UNSCALED,
    ),
    "llama4-seeing": Variant("llama4_seeing", mutations={"chunks": no_window}),
    "llama-tied": Variant("llama", {"tie_word_embeddings": True}, {"tie": turned_head}),
    "llama-biases": Variant(
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        {
            "qkv bias": no_qkv_bias,
            "out bias": no_out_bias,
            "gate and up bias": each("mlp.gate_up", lambda linear: linear.bias.zero_()),
            "down bias": each("mlp.down", lambda linear: linear.bias.zero_()),
        },
    ),
    "llama-one-kv-head": Variant("llama", {"num_key_value_heads": 1}),
    "llama-no-groups": Variant("llama", {"num_key_value_heads": 4}),
    "llama-head-dim": Variant("llama", {"head_dim": 16}, {"scale by head_dim": put("attention", scale=8**-0.5)}),
    "llama-gelu": Variant("llama", {"hidden_act": "gelu"}, {"activation": put("mlp", activation="silu")}),
    "llama-gelu-tanh": Variant(
        "llama", {"hidden_act": "gelu_pytorch_tanh"}, {"activation": put("mlp", activation="gelu")}
    ),
    "llama-theta": Variant("llama", rope("default", rope_theta=500.0), overrides={"theta": rope("default")}),
    "llama-linear": Variant("llama", rope("linear", factor=4.0), overrides=UNSCALED),
    "llama-dynamic": Variant("llama", rope("dynamic", factor=4.0)),
    "llama-llama3": Variant(
        "llama",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
        overrides=UNSCALED,
    ),
    "llama-yarn": Variant("llama", rope("yarn", factor=4.0, original_max_position_embeddings=64), overrides=UNSCALED),
    "llama-yarn-mscale": Variant(
        "llama",
        rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            beta_fast=16,
            beta_slow=2,
            mscale=0.7,
            mscale_all_dim=1.2,
            truncate=False,
        ),
        overrides={
            **UNSCALED,
            "betas": rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                mscale=0.7,
                mscale_all_dim=1.2,
                truncate=False,
            ),
            "mscale": rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=64,
                beta_fast=16,
                beta_slow=2,
                truncate=False,
            ),
        },
    ),
    # The engine chooses factors by its context length, transformers by the sequence's length. Here both agree.
    "llama-longrope-short": Variant("llama", longrope(64), overrides=UNSCALED, context_length=64),
    "llama-longrope-long": Variant("llama", longrope(16), overrides=UNSCALED),
    "mistral": Variant("mistral"),
    "mistral-window": Variant("mistral", {"sliding_window": 7}, {"window": no_window}),
    "mistral-seeing": Variant("mistral_seeing", {"sliding_window": 7}, {"window": no_window}),
    "baichuan": Variant("baichuan", mutations={"values": each("attention.qkv", lambda x: x.weight[-9:].zero_())}),
    "baichuan2": Variant(
        "baichuan2",
        mutations={"values": each("attention.qkv", lambda x: x.weight[-9:].zero_())},
        overrides={"unit head": {"unit_head": False}},
    ),
    "internlm2": Variant("internlm2", mutations={"values": each("attention.qkv", lambda x: x.weight[-9:].zero_())}),
    "internlm2-biases": Variant("internlm2", {"attention_bias": True}, {"qkv bias": no_qkv_bias}),
    "iquestcoder": Variant("iquestcoder"),
    "ministral3": Variant("ministral3", mutations={"scale of queries": put("attention", query_scale=None)}),
    "ministral3-seeing": Variant(
        "ministral3_seeing", {"sliding_window": 7}, {"scale of queries": put("attention", query_scale=None)}
    ),
    "mistral-tied": Variant("mistral", {"tie_word_embeddings": True}, {"tie": turned_head}),
    "qwen2": Variant("qwen2", mutations={"qkv bias": no_qkv_bias}),
    "qwen2-tied": Variant("qwen2", {"tie_word_embeddings": True}, {"tie": turned_head}),
    "qwen2-upper-windows": Variant(
        "qwen2",
        {**WINDOWS, "max_window_layers": 1},
        {"window": no_window, "max_window_layers": put("attention", window=7)},
    ),
    "qwen2-layer-types": Variant(
        "qwen2",
        {**WINDOWS, "layer_types": [SLIDING, FULL, SLIDING]},
        {"window": no_window, "layer_types": put("attention", window=7)},
    ),
    "qwen2-yarn": Variant("qwen2", rope("yarn", factor=4.0, original_max_position_embeddings=64), overrides=UNSCALED),
    "qwen3": Variant("qwen3", mutations={"qk norm": no_qk_norm, "eps": no_eps}),
    "qwen3-tied": Variant("qwen3", {"tie_word_embeddings": True}, {"tie": turned_head}),
    "qwen3-biases": Variant("qwen3", {"attention_bias": True}, {"qkv bias": no_qkv_bias, "out bias": no_out_bias}),
    "qwen3-windows": Variant("qwen3", {**WINDOWS, "max_window_layers": 2}, {"window": no_window}),
    "qwen3-seeing": Variant("qwen3_seeing", {}, {"qk norm": no_qk_norm}),
    "qwen3_5": Variant("qwen3_5", mutations=NETS, overrides={"partial rotation": PARTIAL}),
    "qwen3_5_moe": Variant("qwen3_5_moe", mutations={"shared expert": put("mlp", shared=None)}),
    "qwen3_5_moe_seeing": Variant("qwen3_5_moe_seeing"),
    "qwen3_5_seeing": Variant("qwen3_5_seeing"),
    "qwen3_5-tied": Variant("qwen3_5", {"tie_word_embeddings": True, "num_hidden_layers": 4, "layer_types": None}),
    "qwen3_next": Variant(
        "qwen3_next",
        mutations={**NETS, "shared expert": put("mlp", shared=None)},
        overrides={"experts of a token": {"num_experts_per_tok": 3}},
    ),
    "qwen3_next-some-plain-layers": Variant("qwen3_next", {"mlp_only_layers": [1], "attention_bias": True}),
    "qwen3-moe": Variant(
        "qwen3_moe",
        mutations={
            "qk norm": no_qk_norm,
            "renormalisation": route(renormalise=False),
            "second expert": route(top_k=1),
            "down": each("mlp", lambda mlp: mlp.down.copy_(mlp.down.flip(0))),
        },
        overrides={"experts of a token": {"num_experts_per_tok": 3}},
    ),
    "qwen3-moe-scores-as-they-are": Variant(
        "qwen3_moe", {"norm_topk_prob": False}, {"renormalisation": route(renormalise=True)}
    ),
    "qwen3-moe-some-plain-layers": Variant(
        "qwen3_moe", {"mlp_only_layers": [1], "attention_bias": True}, {"qkv bias": no_qkv_bias}
    ),
    "qwen3-moe-every-second-layer": Variant("qwen3_moe", {"decoder_sparse_step": 2, "num_hidden_layers": 4}),
    "qwen3-moe-windows": Variant("qwen3_moe", WINDOWS, {"window": no_window}),
}
