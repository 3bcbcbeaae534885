"""DeepSeek V2 and V3, and what has V3's layers (Kimi K2, GLM-4.7-Flash): latent attention, experts in most layers.

In V2 experts are chosen by softmax, from the best groups where the model is large; in V3 as in GLM-4.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from torch import nn

from runtime.errors import CheckpointError
from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.latent_attention import LatentAttention
from runtime.layers.moe import MoE, Routing
from runtime.layers.rope_parameters import RopeParameters, read_rope_parameters
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.glm import experts
from runtime.models.llama import block, mlp
from runtime.models.mixtures import beside_shared, grouping, top_k

METHODS = ("greedy", "group_limited_greedy")


def deepseek_v2(config: Config, build: Build) -> Decoder:
    """Some layers have an MLP, most of them experts."""
    return latent(config, build, experts_by_softmax)


def experts_by_softmax(config: Config, index: int, build: Build) -> MoE:
    """The mixture of layer `index`; a group is as good as its best expert (arXiv 2405.04434, section 2.2.2)."""
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
    return beside_shared(
        config, index, build, num_experts, config.integer("n_shared_experts"), routing=routing
    )


def deepseek_v3(config: Config, build: Build) -> Decoder:
    """Some layers have an MLP, most of them experts."""
    return latent(config, build, experts)


def latent(config: Config, build: Build, sparse: Callable[[Config, int, Build], nn.Module]) -> Decoder:
    """A decoder with latent attention, and `sparse` in the place of most MLPs."""

    def layer(index: int) -> PreNormBlock:
        inner = (sparse if is_sparse(config, index) else mlp)(config, index, build)
        return block(config, index, build, attention(config, index, build), inner)

    return assemble(config, build, layer)


def is_sparse(config: Config, index: int) -> bool:
    """By a list of kinds where there is one; else the first `first_k_dense_replace` layers have an MLP."""
    kinds = config.values.get("mlp_layer_types")
    if kinds is None:
        return index >= config.integer("first_k_dense_replace", low=0)
    if (
        not isinstance(kinds, list)
        or len(kinds) != config.num_layers
        or not set(kinds) <= {"dense", "sparse"}
    ):
        raise config.wrong("mlp_layer_types", f"{config.num_layers} of dense, sparse")
    return kinds[index] == "sparse"


def attention(config: Config, index: int, build: Build) -> LatentAttention:
    """The attention of layer `index`."""
    plain_dim, rope_dim = config.integer("qk_nope_head_dim"), config.integer("qk_rope_head_dim")
    own = read_rope_parameters(config, rope_dim)
    rope = replace(own, interleaved=config.flag("rope_interleave", default=True))
    return LatentAttention(
        f"model.layers.{index}.self_attn",
        index,
        config.hidden_size,
        config.num_heads,
        build,
        rank=config.integer("kv_lora_rank"),
        query_rank=config.optional_integer("q_lora_rank"),
        plain_dim=plain_dim,
        rope_dim=rope_dim,
        value_dim=config.integer("v_head_dim"),
        rope=build.rope(rope),
        scale=(plain_dim + rope_dim) ** -0.5 * longer(rope),
        bias=config.flag("attention_bias"),
    )


def longer(rope: RopeParameters) -> float:
    """What scores are multiplied by in a longer context than the trained one (yarn, arXiv 2309.00071)."""
    if not rope.mscale_all_dim or rope.factor <= 1:
        return 1.0
    return (0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0) ** 2
