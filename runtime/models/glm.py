"""GLM-4 of 2024 and of 2025 (0414), and GLM-4.5 to 4.7.

The first is Llama's layer with neighbours rotated in a part of each head, gate and up in one tensor. That of 2025 has
norms behind attention and MLP as well. From 4.5 on most layers have experts: scores by sigmoid, experts from the best
groups, one for every token.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.moe import ExpertNames, MoE, Routing
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp, rms_norm
from runtime.models.mixtures import beside_shared, grouping, top_k
from runtime.models.qwen3 import head_norms

NAMES = ExpertNames(correction="gate.e_score_correction_bias")
GROUP_PLACES = 2  # a group is as good as its two best experts together


def glm(config: Config, build: Build) -> Decoder:
    """Biases of q, k and v where the configuration asks for them."""

    def layer(index: int) -> PreNormBlock:
        attended = attention(config, index, build, **pair_rotated(config, build))
        return block(config, index, build, attended, mlp(config, index, build, fused="gate_up_proj"))

    return assemble(config, build, layer)


def pair_rotated(config: Config, build: Build) -> dict[str, Any]:
    """Of `Attention`, in both GLM-4."""
    rope = build.rope(replace(config.rope(), interleaved=True))
    return {"bias": config.flag("attention_bias"), "rope": rope}


def glm4(config: Config, build: Build) -> Decoder:
    """Attention as in `glm`."""

    def layer(index: int) -> PreNormBlock:
        norm = partial(rms_norm, config, index, build)
        return PreNormBlock(
            norm("input_layernorm"),
            attention(config, index, build, **pair_rotated(config, build)),
            norm("post_attention_layernorm"),
            mlp(config, index, build, fused="gate_up_proj"),
            post_attention_norm=norm("post_self_attn_layernorm"),
            post_mlp_norm=norm("post_mlp_layernorm"),
        )

    return assemble(config, build, layer)


def glm4_moe(config: Config, build: Build) -> Decoder:
    """The first `first_k_dense_replace` layers have an MLP."""
    plain, bias = config.integer("first_k_dense_replace", low=0), config.flag("attention_bias")

    def layer(index: int) -> PreNormBlock:
        options: dict[str, Any] = {"bias": bias}
        if config.flag("use_qk_norm"):
            options["qk_norm"] = head_norms(config, index, build)
        inner: nn.Module = (experts if index >= plain else mlp)(config, index, build)
        return block(config, index, build, attention(config, index, build, **options), inner)

    return assemble(config, build, layer)


def experts(config: Config, index: int, build: Build) -> MoE:
    """The mixture of layer `index` (arXiv 2412.19437, section 2.1.2)."""
    num_experts = config.integer("n_routed_experts")
    routing = Routing(
        top_k(config, num_experts),
        config.flag("norm_topk_prob", default=True),
        scoring="sigmoid",
        grouping=grouping(config, num_experts, GROUP_PLACES),
        scale=config.number("routed_scaling_factor"),
        wide=True,
    )
    num_shared = config.integer("n_shared_experts")
    return beside_shared(config, index, build, num_experts, num_shared, routing=routing, names=NAMES)
