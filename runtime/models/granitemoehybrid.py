"""Granite 4: Mamba 2 in most layers and attention in the others, Granite's factors, an MLP with or without experts."""

from __future__ import annotations

from math import inf

from torch import nn

from runtime.errors import CheckpointError
from runtime.layers.build import Build
from runtime.layers.mlp import GatedMLP
from runtime.layers.recurrent import Mamba2
from runtime.models.config import LINEAR, Config
from runtime.models.decoder import Decoder
from runtime.models.granite import scaled
from runtime.models.granitemoe import NAMES
from runtime.models.llama import attention
from runtime.models.mixtures import block_sparse


def decoder(config: Config, build: Build) -> Decoder:
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
