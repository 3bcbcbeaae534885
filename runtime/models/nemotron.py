"""Nemotron-4 and Minitron: layer norms scaled by 1 + weight, partial rotation, an MLP of squared relu."""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.norm import LayerNorm
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, plain_mlp


def decoder(config: Config, build: Build) -> Decoder:
    """Biases where the configuration asks for them, no window."""
    bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")

    def norm(name: str) -> LayerNorm:
        return LayerNorm(name, config.hidden_size, config.norm_eps, build, unit_offset=True)

    def layer(index: int) -> PreNormBlock:
        name = f"model.layers.{index}"
        return PreNormBlock(
            norm(f"{name}.input_layernorm"),
            attention(config, index, build, bias=bias, out_bias=bias),
            norm(f"{name}.post_attention_layernorm"),
            plain_mlp(config, index, build, bias=mlp_bias),
        )

    return assemble(config, build, layer, norm=norm("model.norm"))
