"""Granite: Llama's layer with multipliers for embeddings, scores, residual additions and logits.

In models with experts, one tensor holds the weights of all experts. Granite 4 has Mamba 2 in most layers and attention
in the other layers; each layer has a shared MLP, and experts if the model has any.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from torch import nn

from runtime.errors import CheckpointError
from runtime.layers.block import ScaledBlock
from runtime.layers.build import Build
from runtime.layers.moe import ExpertNames
from runtime.layers.recurrent import Mamba2
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer
from runtime.modeling.mixtures import block_sparse
from runtime.modeling.spellings import LINEAR
from runtime.models.deepseek import latent_attention

NAMES = ExpertNames(
    router="router.layer", gate="input_linear.weight", up="input_linear.weight", down="output_linear.weight"
)


def granite(config: Config, build: Build) -> Decoder:
    """Build Granite. config.json says whether attention and MLP have biases."""
    return scaled(config, build, lambda at: at.mlp(bias=config.flag("mlp_bias")))


def scaled(
    config: Config,
    build: Build,
    inner: Callable[[Layer], nn.Module],
    mixer: Callable[[Layer, float], nn.Module] = lambda at, scale: at.attention(scale=scale),
) -> Decoder:
    """Return Granite with layers that consist of a mixer and a feed-forward part.

    `mixer` builds a layer's attention (or its replacement) from the layer and the scale of scores. `inner` builds its
    MLP or experts.
    """
    scale, multiplier = config.number("attention_multiplier"), config.number("residual_multiplier")

    def layer(at: Layer) -> nn.Module:
        before, between = at.norm("input_layernorm"), at.norm("post_attention_layernorm")
        return ScaledBlock(before, mixer(at, scale), between, inner(at), build.kernels, multiplier=multiplier)

    return assemble(
        config,
        build,
        layer,
        embedding_scale=config.number("embedding_multiplier"),
        logits_scale=1 / config.number("logits_scaling"),
    )


def minicpm3(config: Config, build: Build) -> Decoder:
    """Build MiniCPM 3: Granite's multipliers, with latent attention. Attention scores have the usual scale."""
    return scaled(config, build, lambda at: at.mlp(bias=config.flag("mlp_bias")), lambda at, _: latent_attention(at))


def granitemoe(config: Config, build: Build) -> Decoder:
    """Build Granite MoE. All layers have experts."""
    return scaled(config, build, lambda at: block_sparse(at, NAMES))


def granitemoehybrid(config: Config, build: Build) -> Decoder:
    """Build Granite 4. `layer_types` says which layers have Mamba 2.

    Attention has rotary embedding only if `position_embedding_type` is "rope".
    """
    kinds = config.layer_types() or []
    options: dict[str, Any] = {} if config.values.get("position_embedding_type") == "rope" else {"rope": None}

    def mixer(at: Layer, scale: float) -> nn.Module:
        return mamba(at) if kinds[at.index] == LINEAR else at.attention(scale=scale, **options)

    return scaled(config, build, inner, mixer)


def mamba(at: Layer) -> Mamba2:
    """Return the Mamba 2 mixer of a layer."""
    config = at.config
    heads, size = config.integer("mamba_n_heads"), config.hidden_size * config.integer("mamba_expand")
    if size % heads or config.values.get("mamba_d_head") not in ("auto", None, size // heads):
        raise CheckpointError(
            f"config.json: mamba_n_heads {heads} and mamba_d_head do not divide {size} dimensions evenly."
        )
    if config.activation != "silu":
        raise CheckpointError("config.json: hidden_act must be silu in a model with Mamba layers.")
    return Mamba2(
        f"{at.name}.mamba",
        at.index,
        config.hidden_size,
        heads,
        size // heads,
        config.integer("mamba_n_groups"),
        config.integer("mamba_d_state"),
        config.integer("mamba_d_conv"),
        config.norm_eps,
        at.build,
        bias=config.flag("mamba_proj_bias"),
        convolution_bias=config.flag("mamba_conv_bias", default=True),
        limits=limits(config),
    )


def limits(config: Config) -> tuple[float, float]:
    """Return the lower and upper bound of the time step. config.json may state infinity as an object."""
    bounds = config.values.get("time_step_limit")
    if bounds is None:
        return 0.0, inf
    if not isinstance(bounds, list | tuple) or len(bounds) != 2:
        raise config.wrong("time_step_limit", "two numbers")
    low, high = (inf if each in ({"__float__": "Infinity"}, "inf") else each for each in bounds)
    if not all(isinstance(each, int | float) for each in (low, high)):
        raise config.wrong("time_step_limit", "two numbers")
    return float(low), float(high)


def inner(at: Layer) -> nn.Module:
    """Return the shared MLP of a layer or, if the model has experts, the experts with this shared MLP."""
    shared = at.mlp(at.config.integer("shared_intermediate_size"), name="shared_mlp", fused="input_linear")
    if not at.config.integer("num_local_experts", low=0):
        return shared
    return block_sparse(at, NAMES, shared=shared)
