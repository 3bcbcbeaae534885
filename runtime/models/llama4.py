"""Llama 4's text: chunks with rotation, layers of all positions without, and experts whose inputs are weighed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from runtime.layers.attention import Attention
from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.mlp import GatedMLP
from runtime.layers.moe import ExpertNames, MoE, Routing
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import QueryScale
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block
from runtime.models.mixtures import top_k

NAMES = ExpertNames(
    router="router",
    gate="experts.gate_up_proj",
    up="experts.gate_up_proj",
    down="experts.down_proj",
    transposed=True,
)


def decoder(config: Config, build: Build) -> Decoder:
    """Every `interleave_moe_layer_step`-th layer has experts, unless `moe_layers` lists those that do."""
    step, sparse = config.integer("interleave_moe_layer_step"), config.values.get("moe_layers")
    if sparse is None:
        sparse = range(step - 1, config.num_layers, step)
    elif not isinstance(sparse, list) or not all(type(each) is int for each in sparse):
        raise config.wrong("moe_layers", "a list of layer numbers")

    scale = None
    if config.flag("attn_temperature_tuning"):
        strength, floor = config.number("attn_scale"), config.integer("floor_scale")
        scale = QueryScale(strength, floor, build.context_length, build.kernels, build.device, first=1)

    def layer(index: int) -> PreNormBlock:
        attended = chunked_attention(config, index, build, scale)
        return block(config, index, build, attended, feed_forward(config, index, build, index in sparse))

    return assemble(config, build, layer)


def chunked_attention(config: Config, index: int, build: Build, scale: QueryScale | None) -> Attention:
    """The attention of layer `index`: `no_rope_layers` holds a 1 for each layer that rotates."""
    rotates, kinds = config.values.get("no_rope_layers"), config.layer_types()
    if not isinstance(rotates, list) or len(rotates) < config.num_layers or not set(rotates) <= {0, 1}:
        raise config.wrong("no_rope_layers", f"{config.num_layers} of 0 and 1")
    chunk, bias = config.optional_integer("attention_chunk_size"), config.flag("attention_bias")
    options: dict[str, Any] = {"bias": bias, "out_bias": bias, "rope": None}
    if kinds is not None and kinds[index] == "sliding_attention":
        options |= {"window": chunk, "chunked": True}
    if rotates[index]:
        options["rope"] = build.rope(replace(config.rope(), interleaved=True))
        if config.flag("use_qk_norm"):
            name = f"model.layers.{index}.self_attn.qk_norm"
            norm = RMSNorm(name, config.head_dim, config.norm_eps, build, weight=False)
            options |= {"qk_norm": (norm, norm), "norm_last": True}
    else:
        options["query_scale"] = scale
    return attention(config, index, build, **options)


def feed_forward(config: Config, index: int, build: Build, sparse: bool) -> nn.Module:
    """The MLP of layer `index`, or its experts and the one that computes every token."""
    name, size, activation = f"model.layers.{index}.feed_forward", config.hidden_size, config.activation
    if not sparse:
        return GatedMLP(name, size, config.integer("intermediate_size_mlp"), activation, build)
    num_experts = config.integer("num_local_experts")
    return MoE(
        name,
        size,
        config.intermediate_size,
        num_experts,
        activation,
        build,
        routing=Routing(top_k(config, num_experts), renormalise=False, scoring="sigmoid", weigh_inputs=True),
        names=NAMES,
        shared=GatedMLP(f"{name}.shared_expert", size, config.intermediate_size, activation, build),
    )
