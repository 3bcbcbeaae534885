"""Ernie 4.5: Llama's layer with neighbours rotated, and one switch for all biases."""

from __future__ import annotations

from dataclasses import replace

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp


def decoder(config: Config, build: Build) -> Decoder:
    """All layers look at all positions."""
    bias, rope = config.flag("use_bias"), build.rope(replace(config.rope(), interleaved=True))

    def layer(index: int) -> PreNormBlock:
        attended = attention(config, index, build, bias=bias, out_bias=bias, rope=rope)
        return block(config, index, build, attended, mlp(config, index, build, bias=bias))

    return assemble(config, build, layer)
