"""Ernie 4.5: Llama's layer with interleaved rotary embedding. The field `use_bias` sets all biases.

MoE layers choose experts by scores with a correction bias, and have shared experts.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from runtime.layers.build import Build
from runtime.layers.moe import ExpertNames, MoE, Routing
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer
from runtime.modeling.mixtures import top_k, with_shared_experts

NAMES = ExpertNames(correction="moe_statics.e_score_correction_bias", correction_in_line=True)


def ernie4_5(config: Config, build: Build) -> Decoder:
    """Build Ernie 4.5. All layers have full attention."""
    bias, rope = config.flag("use_bias"), build.rope(replace(config.rope(), interleaved=True))

    def layer(at: Layer) -> nn.Module:
        return at.block(at.attention(bias=bias, rope=rope), at.mlp(bias=bias))

    return assemble(config, build, layer)


def ernie4_5_moe(config: Config, build: Build) -> Decoder:
    """Build Ernie 4.5 MoE. It has the attention of Ernie 4.5, and experts in the layers of `has_experts`."""
    bias, rope = config.flag("use_bias"), build.rope(replace(config.rope(), interleaved=True))

    def layer(at: Layer) -> nn.Module:
        inner = experts(at, bias=bias) if has_experts(config, at.index) else at.mlp(bias=bias)
        return at.block(at.attention(bias=bias, rope=rope), inner)

    return assemble(config, build, layer, head_bias=bias)


def has_experts(config: Config, index: int) -> bool:
    """Whether layer `index` has experts.

    From `moe_layer_start_index` to `moe_layer_end_index`, every `moe_layer_interval`-th layer has experts.
    """
    last = config.values.get("moe_layer_end_index")
    last = config.num_layers - 1 if last in (None, -1) else config.integer("moe_layer_end_index", low=0)
    within = config.integer("moe_layer_start_index", low=0) <= index <= last
    return within and (index + 1) % config.integer("moe_layer_interval") == 0


def experts(at: Layer, *, bias: bool) -> MoE:
    """Return a layer's experts."""
    config = at.config
    num_experts = config.integer("num_experts")
    routing = Routing(top_k(config, num_experts), renormalise=True, wide=True)
    num_shared = config.optional_integer("moe_num_shared_experts", low=0) or 0
    return with_shared_experts(at, num_experts, num_shared, bias=bias, routing=routing, names=NAMES)
