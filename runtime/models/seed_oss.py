"""Seed-OSS: Llama's layer with a switch of its own for the bias behind attention."""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp


def decoder(config: Config, build: Build) -> Decoder:
    """All layers look at all positions."""
    bias, out_bias = config.flag("attention_bias"), config.flag("attention_out_bias")
    mlp_bias = config.flag("mlp_bias")

    def layer(index: int) -> PreNormBlock:
        attended = attention(config, index, build, bias=bias, out_bias=out_bias)
        return block(config, index, build, attended, mlp(config, index, build, bias=mlp_bias))

    return assemble(config, build, layer)
