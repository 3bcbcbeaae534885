"""ChatGLM 2 and 3, GLM-4 of 2024 and of 2025 (0414), and GLM-4.5 to 4.7.

GLM-4 of 2024 is Llama's layer with partial, interleaved rotary embedding, and gate and up in one tensor. GLM-4 of 2025
adds norms after attention and MLP. From GLM-4.5 on, most layers have experts, with sigmoid scores, group-limited
routing and a shared expert.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.moe import ExpertNames, MoE
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.draft_head import prediction_head
from runtime.modeling.layer import Layer
from runtime.modeling.mixtures import sigmoid_routing, with_shared_experts

NAMES = ExpertNames(correction="gate.e_score_correction_bias")


def glm(config: Config, build: Build) -> Decoder:
    """Build GLM-4 of 2024. config.json says whether q, k and v have biases."""
    rope = build.rope(replace(config.rope(), interleaved=True))

    def layer(at: Layer) -> nn.Module:
        return at.block(at.attention(out_bias=False, rope=rope), at.mlp(fused="gate_up_proj"))

    return assemble(config, build, layer)


def chatglm(config: Config, build: Build) -> Decoder:
    """Build ChatGLM 2 or 3, or GLM-4 of 2024 from a checkpoint that uses ChatGLM's names."""
    rope = build.rope(replace(config.rope(), interleaved=config.flag("original_rope", default=True)))
    bias = config.flag("add_qkv_bias")

    def layer(at: Layer) -> nn.Module:
        attended = at.attention(bias=bias, out_bias=False, rope=rope, fused="query_key_value")
        return at.block(attended, at.mlp(fused="dense_h_to_4h"))

    return assemble(config, build, layer)


def glm4(config: Config, build: Build) -> Decoder:
    """Build GLM-4 of 2025, with the attention of 2024."""
    rope = build.rope(replace(config.rope(), interleaved=True))

    def layer(at: Layer) -> nn.Module:
        return PreNormBlock(
            at.norm("input_layernorm"),
            at.attention(out_bias=False, rope=rope),
            at.norm("post_attention_layernorm"),
            at.mlp(fused="gate_up_proj"),
            post_attention_norm=at.norm("post_self_attn_layernorm"),
            post_mlp_norm=at.norm("post_mlp_layernorm"),
        )

    return assemble(config, build, layer)


def glm4_moe(config: Config, build: Build) -> Decoder:
    """Build GLM-4.5 to 4.7. The first `first_k_dense_replace` layers have an MLP; the other layers have experts."""
    num_dense = config.integer("first_k_dense_replace", low=0)

    def layer(at: Layer) -> nn.Module:
        qk_norm = at.head_norms() if config.flag("use_qk_norm") else None
        return at.block(
            at.attention(out_bias=False, qk_norm=qk_norm), experts(at) if at.index >= num_dense else at.mlp()
        )

    return assemble(config, build, layer)


def experts(at: Layer) -> MoE:
    """Return a layer's experts (arXiv 2412.19437, section 2.1.2)."""
    config = at.config
    num_experts = config.integer("n_routed_experts")
    num_shared = config.integer("n_shared_experts")
    routing = sigmoid_routing(config, num_experts)
    return with_shared_experts(at, num_experts, num_shared, routing=routing, names=NAMES)


def nextn(config: Config, build: Build) -> Decoder:
    """Return the first multi-token prediction layer of GLM-4.5, which has experts."""
    at = Layer(config, build, 0, "model.layers.0")
    qk_norm = at.head_norms() if config.flag("use_qk_norm") else None
    return prediction_head(at, at.block(at.attention(out_bias=False, qk_norm=qk_norm), experts(at)))
