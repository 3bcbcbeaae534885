"""Arcee (AFM): Llama's layer with an MLP without a gate, of squared relu."""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, plain_mlp


def decoder(config: Config, build: Build) -> Decoder:
    """Biases where the configuration asks for them, no window."""
    bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")

    def layer(index: int) -> PreNormBlock:
        attended = attention(config, index, build, bias=bias, out_bias=bias)
        return block(config, index, build, attended, plain_mlp(config, index, build, bias=mlp_bias))

    return assemble(config, build, layer)
