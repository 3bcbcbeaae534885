"""Mistral and Ministral: Llama's layer without biases, in a window if there is one."""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp


def decoder(config: Config, build: Build) -> Decoder:
    """All layers, or those that `layer_types` lists, look at the last `sliding_window` positions."""
    window = config.optional_integer("sliding_window")
    kinds = config.layer_types() or ["sliding_attention"] * config.num_layers

    def layer(index: int) -> PreNormBlock:
        attended = attention(
            config, index, build, window=window if kinds[index] == "sliding_attention" else None
        )
        return block(config, index, build, attended, mlp(config, index, build))

    return assemble(config, build, layer)
