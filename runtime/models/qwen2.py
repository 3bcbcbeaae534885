"""Qwen 2 and 2.5: Llama's layer with biases on q, k and v, and windows on the upper layers if asked for."""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp


def decoder(config: Config, build: Build) -> Decoder:
    """Windows as `window` says."""

    def layer(index: int) -> PreNormBlock:
        attended = attention(config, index, build, bias=True, window=window(config, index))
        return block(config, index, build, attended, mlp(config, index, build))

    return assemble(config, build, layer)


def window(config: Config, index: int) -> int | None:
    """The layer's window: where `layer_types` says so, or else from layer `max_window_layers` on."""
    size = config.optional_integer("sliding_window", low=0)
    if not size or not config.flag("use_sliding_window"):
        return None
    kinds = config.layer_types()
    if kinds is not None:
        return size if kinds[index] == "sliding_attention" else None
    return size if index >= config.integer("max_window_layers", low=0) else None
