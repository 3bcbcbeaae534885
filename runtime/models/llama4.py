"""Llama 4's text model.

Layers have chunked attention with rotary embedding, or full attention without. Routing weights multiply the inputs of
experts, not their outputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from runtime.layers.attention import Attention
from runtime.layers.build import Build
from runtime.layers.moe import ExpertNames, Routing
from runtime.layers.norm import RMSNorm
from runtime.layers.rope import QueryScale
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer
from runtime.modeling.mixtures import top_k

NAMES = ExpertNames(
    router="router",
    gate="experts.gate_up_proj",
    up="experts.gate_up_proj",
    down="experts.down_proj",
    transposed=True,
)


def decoder(config: Config, build: Build) -> Decoder:
    """Build Llama 4.

    The layers that `moe_layers` lists have experts. If `moe_layers` is missing, every `interleave_moe_layer_step`-th
    layer has experts.
    """
    step, sparse = config.integer("interleave_moe_layer_step"), config.values.get("moe_layers")
    if sparse is None:
        sparse = range(step - 1, config.num_layers, step)
    elif not isinstance(sparse, list) or not all(type(each) is int for each in sparse):
        raise config.wrong("moe_layers", "a list of layer numbers")

    scale = None
    if config.flag("attn_temperature_tuning"):
        strength, floor = config.number("attn_scale"), config.integer("floor_scale")
        scale = QueryScale(strength, floor, build.context_length, build.kernels, build.device, first=1)

    def layer(at: Layer) -> nn.Module:
        return at.block(chunked_attention(at, scale), feed_forward(at, at.index in sparse))

    return assemble(config, build, layer)


def chunked_attention(at: Layer, scale: QueryScale | None) -> Attention:
    """Return the attention of a layer. `no_rope_layers` holds 1 for layers with rotary embedding, else 0."""
    config, index, build = at.config, at.index, at.build
    rotates, kinds = config.values.get("no_rope_layers"), config.layer_types()
    if not isinstance(rotates, list) or len(rotates) < config.num_layers or not set(rotates) <= {0, 1}:
        raise config.wrong("no_rope_layers", f"{config.num_layers} of 0 and 1")
    options: dict[str, Any] = {"rope": None}
    if kinds is not None and kinds[index] == "sliding_attention":
        options |= {"window": config.optional_integer("attention_chunk_size"), "chunked": True}
    if rotates[index]:
        options["rope"] = build.rope(replace(config.rope(), interleaved=True))
        if config.flag("use_qk_norm"):
            name = f"{at.name}.self_attn.qk_norm"
            norm = RMSNorm(name, config.head_dim, config.norm_eps, build, weight=False)
            options |= {"qk_norm": (norm, norm), "norm_last": True}
    else:
        options["query_scale"] = scale
    return at.attention(**options)


def feed_forward(at: Layer, sparse: bool) -> nn.Module:
    """Return the MLP of a layer or, if it is `sparse`, its experts and shared expert."""
    config = at.config
    if not sparse:
        return at.mlp(config.integer("intermediate_size_mlp"), name="feed_forward")
    num_experts = config.integer("num_local_experts")
    return at.experts(
        config.intermediate_size,
        num_experts,
        name="feed_forward",
        routing=Routing(top_k(config, num_experts), renormalise=False, scoring="sigmoid", weigh_inputs=True),
        names=NAMES,
        shared=at.mlp(name="feed_forward.shared_expert"),
    )
