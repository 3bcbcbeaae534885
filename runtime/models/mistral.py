"""Mistral: Llama's layer without biases, in a window if there is one."""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.models.config import Config
from runtime.models.decoder import Build
from runtime.models.llama import block


def layer(config: Config, index: int, build: Build) -> PreNormBlock:
    """All layers look at the last `sliding_window` positions."""
    return block(config, index, build, window=config.optional_integer("sliding_window"))
