"""Qwen 3: Llama's layer with q and k normalised per head, windows as in Qwen 2."""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.models.config import Config
from runtime.models.decoder import Build
from runtime.models.llama import block
from runtime.models.qwen2 import window


def layer(config: Config, index: int, build: Build) -> PreNormBlock:
    """Layer `index`; one switch for the biases of all four projections."""
    bias = config.flag("attention_bias")
    return block(
        config,
        index,
        build,
        qkv_bias=bias,
        out_bias=bias,
        qk_norm=True,
        window=window(config, index),
    )
