"""Qwen 3: Llama's layer with q and k normalised per head, windows as in Qwen 2."""

from __future__ import annotations

from runtime.layers.attention import Attention
from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp
from runtime.models.qwen2 import window


def decoder(config: Config, build: Build) -> Decoder:
    """Windows as in Qwen 2."""

    def layer(index: int) -> PreNormBlock:
        attended = normed_attention(config, index, build, window(config, index))
        return block(config, index, build, attended, mlp(config, index, build))

    return assemble(config, build, layer)


def normed_attention(config: Config, index: int, build: Build, window: int | None) -> Attention:
    """One switch for the biases of all four projections."""
    bias, eps = config.flag("attention_bias"), config.norm_eps
    return attention(config, index, build, bias=bias, out_bias=bias, qk_norm_eps=eps, window=window)
