"""Granite: Llama's layer with factors on vectors, scores, what is added to the residual, and logits."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from runtime.layers.block import ScaledBlock
from runtime.layers.build import Build
from runtime.layers.norm import RMSNorm
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, mlp


def decoder(config: Config, build: Build) -> Decoder:
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
        def norm(name: str) -> RMSNorm:
            return RMSNorm(f"model.layers.{index}.{name}", config.hidden_size, config.norm_eps, build)

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
