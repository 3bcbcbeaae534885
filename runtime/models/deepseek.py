"""DeepSeek MoE, V2, V3 and models with V3's layers (Kimi K2, GLM-4.7-Flash). Most layers have experts.

DeepSeek MoE has Llama's attention; V2 and V3 have latent attention. V2 routes by softmax scores, and its large models
limit routing to the best groups of experts. V3 routes like GLM-4.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from runtime.errors import CheckpointError
from runtime.layers.build import Build
from runtime.layers.latent_attention import LatentAttention
from runtime.layers.moe import MoE, Routing
from runtime.layers.rope_parameters import RopeParameters, read_rope_parameters
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.draft_head import prediction_head
from runtime.modeling.layer import Layer
from runtime.modeling.mixtures import grouping, top_k, with_shared_experts
from runtime.models.glm import experts

METHODS = ("greedy", "group_limited_greedy")


def deepseek(config: Config, build: Build) -> Decoder:
    """Build DeepSeek MoE (arXiv 2401.06066): Llama's attention, and experts in most layers."""
    interval = config.integer("moe_layer_freq")

    def layer(at: Layer) -> nn.Module:
        sparse = is_sparse(config, at.index) and at.index % interval == 0
        sparse = sparse and config.values.get("n_routed_experts") is not None
        return at.block(at.attention(), first_experts(at) if sparse else at.mlp())

    return assemble(config, build, layer)


def first_experts(at: Layer) -> MoE:
    """Return a layer's experts, which are chosen by softmax scores."""
    config = at.config
    num_experts = config.integer("n_routed_experts")
    config.choice("scoring_func", ["softmax"], default="softmax")
    routing = Routing(top_k(config, num_experts), renormalise=config.flag("norm_topk_prob"))
    return with_shared_experts(at, num_experts, config.integer("n_shared_experts", low=0), routing=routing)


def deepseek_v2(config: Config, build: Build) -> Decoder:
    """Build DeepSeek V2. Most layers have experts; the other layers have an MLP."""
    return latent(config, build, experts_by_softmax)


def experts_by_softmax(at: Layer) -> MoE:
    """Return a layer's experts (arXiv 2405.04434, section 2.2.2).

    Groups of experts are ranked by the score of their best expert.
    """
    config = at.config
    num_experts = config.integer("n_routed_experts")
    if config.flag("norm_topk_prob"):
        raise CheckpointError("config.json: norm_topk_prob of DeepSeek V2 is not supported.")
    limited = config.choice("topk_method", [*METHODS], default="greedy") != "greedy"
    routing = Routing(
        top_k(config, num_experts),
        renormalise=False,
        grouping=grouping(config, num_experts, 1) if limited else None,
        scale=config.number("routed_scaling_factor"),
        wide=True,
    )
    return with_shared_experts(at, num_experts, config.integer("n_shared_experts"), routing=routing)


def deepseek_v3(config: Config, build: Build) -> Decoder:
    """Build DeepSeek V3. Most layers have experts; the other layers have an MLP."""
    return latent(config, build, experts)


def latent(config: Config, build: Build, sparse: Callable[[Layer], nn.Module]) -> Decoder:
    """Return a decoder with latent attention. `sparse` builds the experts of the layers that have experts."""

    def layer(at: Layer) -> nn.Module:
        return at.block(latent_attention(at), sparse(at) if is_sparse(config, at.index) else at.mlp())

    return assemble(config, build, layer)


def is_sparse(config: Config, index: int) -> bool:
    """Whether layer `index` has experts.

    `mlp_layer_types` lists the kind of each layer. If it is missing, all layers from `first_k_dense_replace` on have
    experts.
    """
    kinds = config.values.get("mlp_layer_types")
    if kinds is None:
        return index >= config.integer("first_k_dense_replace", low=0)
    if not isinstance(kinds, list) or len(kinds) != config.num_layers or not set(kinds) <= {"dense", "sparse"}:
        raise config.wrong("mlp_layer_types", f"{config.num_layers} of dense, sparse")
    return kinds[index] == "sparse"


def latent_attention(at: Layer) -> LatentAttention:
    """Return the latent attention of a layer."""
    config = at.config
    nope_dim, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    parameters = read_rope_parameters(config, rope_dim)
    rope = replace(parameters, interleaved=config.flag("rope_interleave", default=True))
    return LatentAttention(
        f"{at.name}.self_attn",
        at.index,
        config.hidden_size,
        config.num_heads,
        at.build,
        rank=config.integer("kv_lora_rank"),
        query_rank=config.optional_integer("q_lora_rank"),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=config.integer("v_head_dim"),
        rope=at.build.rope(rope),
        scale=(nope_dim + rope_dim) ** -0.5 * longer(rope),
        bias=config.flag("attention_bias"),
    )


def longer(rope: RopeParameters) -> float:
    """Return the factor of attention scores for an extended context (YaRN, arXiv 2309.00071)."""
    if not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2


def nextn(config: Config, build: Build) -> Decoder:
    """Return the first multi-token prediction layer, which has experts."""
    at = Layer(config, build, 0, "model.layers.0")
    return prediction_head(at, at.block(latent_attention(at), experts(at)))
