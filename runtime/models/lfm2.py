"""LFM2: gated short convolutions in most layers, Qwen 3's attention in the other layers.

In LFM2 MoE, the first layers have an MLP. The other layers choose experts by sigmoid scores with a correction bias.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from runtime.layers.build import Build
from runtime.layers.moe import ExpertNames, MoE, Routing
from runtime.layers.recurrent import ShortConvolution
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer
from runtime.modeling.mixtures import top_k
from runtime.modeling.spellings import LINEAR


def lfm2(config: Config, build: Build) -> Decoder:
    """Build LFM2. All layers have an MLP."""
    size = inner_size(config)
    return hybrid(config, build, lambda at: at.mlp(size, activation="silu"))


def lfm2_moe(config: Config, build: Build) -> Decoder:
    """Build LFM2 MoE. The first `num_dense_layers` layers have an MLP; the other layers have experts."""
    num_dense = config.integer("num_dense_layers", low=0)
    return hybrid(config, build, lambda at: at.mlp() if at.index < num_dense else experts(at))


def hybrid(config: Config, build: Build, inner: Callable[[Layer], nn.Module]) -> Decoder:
    """Return a decoder with convolutions and attention, as `layer_types` says. `inner` builds MLPs or experts."""
    kinds = config.layer_types() or []

    def layer(at: Layer) -> nn.Module:
        if kinds[at.index] == LINEAR:
            mixer: nn.Module = convolution(at)
        else:
            mixer = at.attention(bias=False, qk_norm=at.head_norms())
        return at.block(mixer, inner(at))

    return assemble(config, build, layer)


def convolution(at: Layer) -> ShortConvolution:
    """Return the convolution of a layer. Its cache holds the last `conv_L_cache` - 1 inputs."""
    kernel, bias = at.config.integer("conv_L_cache", low=2), at.config.flag("conv_bias")
    return ShortConvolution(f"{at.name}.conv", at.index, at.config.hidden_size, kernel, at.build, bias=bias)


def inner_size(config: Config) -> int:
    """Return the inner size of the MLP.

    With `block_auto_adjust_ff_dim`, the size is two thirds of the configured size, times `block_ffn_dim_multiplier`,
    rounded up to a multiple of `block_multiple_of`.
    """
    size = config.intermediate_size
    if not config.flag("block_auto_adjust_ff_dim"):
        return size
    multiple = config.integer("block_multiple_of")
    adjusted = int(config.number("block_ffn_dim_multiplier") * (2 * size // 3))
    return -(-adjusted // multiple) * multiple


def experts(at: Layer) -> MoE:
    """Return a layer's experts."""
    config = at.config
    num_experts = config.integer("num_experts")
    routing = Routing(
        top_k(config, num_experts),
        config.flag("norm_topk_prob"),
        scoring="sigmoid",
        scale=config.number("routed_scaling_factor"),
    )
    names = ExpertNames(correction="expert_bias" if config.flag("use_expert_bias") else "")
    size = config.integer("moe_intermediate_size")
    return at.experts(size, num_experts, activation="silu", routing=routing, names=names)
