"""Ling (BailingMoe): Llama's attention with q, k and v in one tensor, and experts in most layers.

Ling 2.0 normalises q and k per head, rotates part of each head, and routes like DeepSeek V3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from runtime.errors import CheckpointError
from runtime.layers.build import Build
from runtime.layers.moe import ExpertNames, MoE, Routing
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer
from runtime.modeling.mixtures import sigmoid_routing, top_k

NAMES = ExpertNames(correction="gate.expert_bias")


def bailing(config: Config, build: Build) -> Decoder:
    """Build Ling. Experts are chosen by softmax scores. `norm_head` scales the columns of the LM head to length one."""
    if config.flag("multi_gate"):
        raise CheckpointError("config.json: multi_gate is not supported.")

    def layer(at: Layer) -> nn.Module:
        return at.block(attention(at), experts(at, softmax_routing) if is_sparse(at) else dense(at))

    return assemble(config, build, layer, unit_head="columns" if config.flag("norm_head") else None)


def bailing_v2(config: Config, build: Build) -> Decoder:
    """Build Ling 2.0. Experts are chosen by sigmoid scores."""
    config.choice("score_function", ["sigmoid"], default="sigmoid")
    names = NAMES if config.flag("moe_router_enable_expert_bias", default=True) else ExpertNames()

    def layer(at: Layer) -> nn.Module:
        norms = at.head_norms() if config.flag("use_qk_norm", default=True) else None
        attended = attention(at, qk_norm=norms)
        return at.block(attended, experts(at, sigmoid_routing, names=names) if is_sparse(at) else dense(at))

    return assemble(config, build, layer)


def softmax_routing(config: Config, num_experts: int) -> Routing:
    """Return the routing of Ling 1."""
    return Routing(top_k(config, num_experts), renormalise=config.flag("norm_topk_prob"))


def attention(at: Layer, **options: Any) -> nn.Module:
    """Return a layer's attention, whose q, k and v share one tensor."""
    bias = at.config.flag("use_bias")
    qkv_bias = bias or at.config.flag("use_qkv_bias")
    return at.attention(bias=qkv_bias, out_bias=bias, fused="query_key_value", **options)


def is_sparse(at: Layer) -> bool:
    """Whether the layer has experts."""
    return at.index >= at.config.integer("first_k_dense_replace", low=0)


def dense(at: Layer) -> nn.Module:
    """Return the MLP of a layer without experts."""
    return at.mlp(bias=at.config.flag("use_bias"))


def experts(at: Layer, routing: Callable[[Config, int], Routing], **options: Any) -> MoE:
    """Return a layer's experts. All shared experts together form one MLP."""
    config = at.config
    num_experts, size = config.integer("num_experts"), config.integer("moe_intermediate_size")
    num_shared = config.integer("num_shared_experts", low=0)
    shared_size = config.optional_integer("moe_shared_expert_intermediate_size") or size
    shared = None
    if num_shared:
        shared = at.mlp(shared_size * num_shared, name="mlp.shared_experts", bias=config.flag("use_bias"))
    return at.experts(size, num_experts, routing=routing(config, num_experts), shared=shared, **options)
