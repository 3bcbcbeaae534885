"""LFM2: short convolutions between gates in most layers, in the others Qwen 3's attention.

Its mixtures stand behind some layers with an MLP; experts are chosen by corrected sigmoids.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.mlp import GatedMLP
from runtime.layers.moe import ExpertNames, MoE, Routing
from runtime.layers.recurrent import ShortConvolution
from runtime.models.config import LINEAR, Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp
from runtime.models.mixtures import top_k
from runtime.models.qwen3 import head_norms


def lfm2(config: Config, build: Build) -> Decoder:
    """An MLP in every layer."""
    size = inner_size(config)

    def inner(index: int) -> nn.Module:
        return GatedMLP(f"model.layers.{index}.mlp", config.hidden_size, size, "silu", build)

    return hybrid(config, build, inner)


def lfm2_moe(config: Config, build: Build) -> Decoder:
    """The first `num_dense_layers` have an MLP, the others experts."""
    plain = config.integer("num_dense_layers", low=0)
    return hybrid(config, build, lambda index: (mlp if index < plain else experts)(config, index, build))


def hybrid(config: Config, build: Build, inner: Callable[[int], nn.Module]) -> Decoder:
    """Layers as `layer_types` says, with `inner` behind attention and convolutions."""
    kinds = config.layer_types() or []

    def layer(index: int) -> PreNormBlock:
        if kinds[index] == LINEAR:
            mixer: nn.Module = convolution(config, index, build)
        else:
            mixer = attention(config, index, build, qk_norm=head_norms(config, index, build))
        return block(config, index, build, mixer, inner(index))

    return assemble(config, build, layer)


def convolution(config: Config, index: int, build: Build) -> ShortConvolution:
    """The layer that keeps a state: of `conv_L_cache` - 1 tokens, its own being the last that it sees."""
    kernel = config.integer("conv_L_cache", low=2)
    name, bias = f"model.layers.{index}.conv", config.flag("conv_bias")
    return ShortConvolution(name, index, config.hidden_size, kernel, build, bias=bias)


def inner_size(config: Config) -> int:
    """Of the MLP: where `block_auto_adjust_ff_dim` asks for it two thirds of what the configuration says, times a
    factor and rounded up to a multiple.
    """
    size = config.intermediate_size
    if not config.flag("block_auto_adjust_ff_dim"):
        return size
    multiple = config.integer("block_multiple_of")
    adjusted = int(config.number("block_ffn_dim_multiplier") * (2 * size // 3))
    return -(-adjusted // multiple) * multiple


def experts(config: Config, index: int, build: Build) -> MoE:
    """The mixture of layer `index`."""
    num_experts = config.integer("num_experts")
    return MoE(
        f"model.layers.{index}.mlp",
        config.hidden_size,
        config.integer("moe_intermediate_size"),
        num_experts,
        "silu",
        build,
        routing=Routing(
            top_k(config, num_experts),
            config.flag("norm_topk_prob"),
            scoring="sigmoid",
            scale=config.number("routed_scaling_factor"),
        ),
        names=ExpertNames(correction="expert_bias" if config.flag("use_expert_bias") else ""),
    )
