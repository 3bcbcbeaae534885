"""Llama, and the parts of it that the many models of its shape share."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from runtime.layers.attention import Attention
from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.mlp import MLP, GatedMLP
from runtime.layers.norm import RMSNorm
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble


def decoder(config: Config, build: Build) -> Decoder:
    """Biases where the configuration asks for them, no window."""
    bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")

    def layer(index: int) -> PreNormBlock:
        attended = attention(config, index, build, bias=bias, out_bias=bias)
        return block(config, index, build, attended, mlp(config, index, build, bias=mlp_bias))

    return assemble(config, build, layer)


def attention(config: Config, index: int, build: Build, *, name: str = "", **options: Any) -> Attention:
    """The attention of layer `index`; `options` are those of `Attention`, all layers rotating alike without one."""
    if "rope" not in options:
        options["rope"] = build.rope(config.rope())
    return Attention(
        name or f"model.layers.{index}.self_attn",
        index,
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        build,
        **options,
    )


def mlp(
    config: Config, index: int, build: Build, *, activation: str | None = None, **options: Any
) -> GatedMLP:
    """The MLP of layer `index`, with the configuration's activation unless told; `options` are those of `GatedMLP`."""
    name, activation = f"model.layers.{index}.mlp", activation or config.activation
    return GatedMLP(name, config.hidden_size, config.intermediate_size, activation, build, **options)


def plain_mlp(config: Config, index: int, build: Build, **options: Any) -> MLP:
    """The MLP of layer `index` where it has no gate; `options` are those of `MLP`."""
    name, sizes = f"model.layers.{index}.mlp", (config.hidden_size, config.intermediate_size)
    return MLP(name, *sizes, config.activation, build, **options)


def rms_norm(config: Config, index: int, build: Build, name: str, *, unit_offset: bool = False) -> RMSNorm:
    """The norm of this name in layer `index`."""
    prefix = f"model.layers.{index}.{name}"
    return RMSNorm(prefix, config.hidden_size, config.norm_eps, build, unit_offset=unit_offset)


def block(
    config: Config,
    index: int,
    build: Build,
    attention: nn.Module,
    mlp: nn.Module,
    *,
    unit_offset: bool = False,
) -> PreNormBlock:
    """Layer `index` of these parts, with a norm before each."""

    norm = partial(rms_norm, config, index, build, unit_offset=unit_offset)
    return PreNormBlock(norm("input_layernorm"), attention, norm("post_attention_layernorm"), mlp)
