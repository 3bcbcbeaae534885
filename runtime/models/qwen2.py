"""Qwen 2 and 2.5: Llama's layer with biases on q, k and v, and windows on the upper layers if asked for."""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.models.config import Config
from runtime.models.decoder import Build
from runtime.models.llama import block


def layer(config: Config, index: int, build: Build) -> PreNormBlock:
    """Layer `index`; see `window`."""
    return block(config, index, build, qkv_bias=True, window=window(config, index))


def window(config: Config, index: int) -> int | None:
    """The layer's window: where `layer_types` says so, or else from layer `max_window_layers` on."""
    size = config.optional_integer("sliding_window")
    if size is None or not config.flag("use_sliding_window"):
        return None
    kinds = config.layer_types()
    if kinds is not None:
        return size if kinds[index] == "sliding_attention" else None
    return size if index >= config.integer("max_window_layers", low=0) else None
