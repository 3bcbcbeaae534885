"""Granite: Llama's layer with factors on vectors, scores, what is added to the residual, and logits.

With mixtures the weights of all experts are in one tensor. Granite 4 has Mamba 2 in most layers and attention in the
others, and an MLP with or without experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf

from torch import nn

from runtime.errors import CheckpointError
from runtime.layers.block import ScaledBlock
from runtime.layers.build import Build
from runtime.layers.mlp import GatedMLP
from runtime.layers.moe import ExpertNames
from runtime.layers.recurrent import Mamba2
from runtime.models.config import LINEAR, Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, mlp, rms_norm
from runtime.models.mixtures import block_sparse

NAMES = ExpertNames(
    router="router.layer", gate="input_linear.weight", up="input_linear.weight", down="output_linear.weight"
)


def granite(config: Config, build: Build) -> Decoder:
    """Biases where the configuration asks for them."""
    bias = config.flag("mlp_bias")
    return scaled(config, build, lambda index: mlp(config, index, build, bias=bias))


def scaled(
    config: Config,
    build: Build,
    inner: Callable[[int], nn.Module],
    mixer: Callable[[int], nn.Module] | None = None,
) -> Decoder:
    """Granite with `inner` in the place of each layer's MLP, and `mixer` in that of its attention."""
    bias, scale = config.flag("attention_bias"), config.number("attention_multiplier")
    multiplier = config.number("residual_multiplier")

    def layer(index: int) -> ScaledBlock:
        norm = partial(rms_norm, config, index, build)
        return ScaledBlock(
            norm("input_layernorm"),
            mixer(index) if mixer else attention(config, index, build, bias=bias, out_bias=bias, scale=scale),
            norm("post_attention_layernorm"),
            inner(index),
            build.kernels,
            multiplier=multiplier,
        )

    return assemble(
        config,
        build,
        layer,
        embedding_scale=config.number("embedding_multiplier"),
        logits_scale=1 / config.number("logits_scaling"),
    )


def granitemoe(config: Config, build: Build) -> Decoder:
    """Experts in every layer."""
    return scaled(config, build, lambda index: block_sparse(config, index, build, NAMES))


def granitemoehybrid(config: Config, build: Build) -> Decoder:
    """Layers as `layer_types` says; attention rotates only where the configuration asks for it."""
    kinds, bias = config.layer_types() or [], config.flag("attention_bias")
    options = {"bias": bias, "out_bias": bias, "scale": config.number("attention_multiplier")}
    if config.values.get("position_embedding_type") != "rope":
        options["rope"] = None

    def mixer(index: int) -> nn.Module:
        if kinds[index] == LINEAR:
            return mamba(config, index, build)
        return attention(config, index, build, **options)

    return scaled(config, build, lambda index: inner(config, index, build), mixer)


def mamba(config: Config, index: int, build: Build) -> Mamba2:
    """The layer that keeps a state."""
    heads, size = config.integer("mamba_n_heads"), config.hidden_size * config.integer("mamba_expand")
    if size % heads or config.values.get("mamba_d_head") not in ("auto", None, size // heads):
        raise CheckpointError(f"config.json: {heads} Mamba heads do not fill {size} dimensions.")
    if config.activation != "silu":
        raise CheckpointError("config.json: hidden_act must be silu in a model with Mamba layers.")
    return Mamba2(
        f"model.layers.{index}.mamba",
        index,
        config.hidden_size,
        heads,
        size // heads,
        config.integer("mamba_n_groups"),
        config.integer("mamba_d_state"),
        config.integer("mamba_d_conv"),
        config.norm_eps,
        build,
        bias=config.flag("mamba_proj_bias"),
        convolution_bias=config.flag("mamba_conv_bias", default=True),
        limits=limits(config),
    )


def limits(config: Config) -> tuple[float, float]:
    """Between which a step in time is held; in JSON infinity is an object."""
    given = config.values.get("time_step_limit")
    if given is None:
        return 0.0, inf
    if not isinstance(given, list | tuple) or len(given) != 2:
        raise config.wrong("time_step_limit", "two numbers")
    low, high = (inf if each in ({"__float__": "Infinity"}, "inf") else each for each in given)
    if not all(isinstance(each, int | float) for each in (low, high)):
        raise config.wrong("time_step_limit", "two numbers")
    return float(low), float(high)


def inner(config: Config, index: int, build: Build) -> nn.Module:
    """An MLP for every token and, where the model has any, experts beside it."""
    sizes = (config.hidden_size, config.integer("shared_intermediate_size"))
    name = f"model.layers.{index}.shared_mlp"
    shared = GatedMLP(name, *sizes, config.activation, build, fused="input_linear")
    if not config.integer("num_local_experts", low=0):
        return shared
    return block_sparse(config, index, build, NAMES, shared=shared)
