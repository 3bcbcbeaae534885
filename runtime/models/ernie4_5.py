"""Ernie 4.5: Llama's layer with neighbours rotated, and one switch for all biases.

Its mixtures of experts are chosen by corrected scores; beside them stand some that compute every token.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.moe import ExpertNames, MoE, Routing
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp
from runtime.models.mixtures import beside_shared, top_k

NAMES = ExpertNames(correction="moe_statics.e_score_correction_bias", correction_in_line=True)


def ernie4_5(config: Config, build: Build) -> Decoder:
    """All layers look at all positions."""
    bias, rope = config.flag("use_bias"), build.rope(replace(config.rope(), interleaved=True))

    def layer(index: int) -> PreNormBlock:
        attended = attention(config, index, build, bias=bias, out_bias=bias, rope=rope)
        return block(config, index, build, attended, mlp(config, index, build, bias=bias))

    return assemble(config, build, layer)


def ernie4_5_moe(config: Config, build: Build) -> Decoder:
    """Attention as in `ernie4_5`."""
    bias, rope = config.flag("use_bias"), build.rope(replace(config.rope(), interleaved=True))

    def layer(index: int) -> PreNormBlock:
        attended = attention(config, index, build, bias=bias, out_bias=bias, rope=rope)
        inner: nn.Module = mlp(config, index, build, bias=bias)
        if has_experts(config, index):
            inner = experts(config, index, build, bias=bias)
        return block(config, index, build, attended, inner)

    return assemble(config, build, layer, head_bias=bias)


def has_experts(config: Config, index: int) -> bool:
    """Every `moe_layer_interval`-th layer of those from one number to another."""
    last = config.values.get("moe_layer_end_index")
    last = config.num_layers - 1 if last in (None, -1) else config.integer("moe_layer_end_index", low=0)
    within = config.integer("moe_layer_start_index", low=0) <= index <= last
    return within and (index + 1) % config.integer("moe_layer_interval") == 0


def experts(config: Config, index: int, build: Build, *, bias: bool) -> MoE:
    """The mixture of layer `index`."""
    num_experts = config.integer("num_experts")
    routing = Routing(top_k(config, num_experts), renormalise=True, wide=True)
    num_shared = config.optional_integer("moe_num_shared_experts", low=0) or 0
    return beside_shared(
        config, index, build, num_experts, num_shared, bias=bias, routing=routing, names=NAMES
    )
