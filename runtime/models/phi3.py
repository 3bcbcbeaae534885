"""Phi-3 and Phi-4: Llama's layer without biases, q, k and v in one tensor, gate and up as well, in a window if any."""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp


def decoder(config: Config, build: Build) -> Decoder:
    """All layers look at the last `sliding_window` positions."""
    window = config.optional_integer("sliding_window")

    def layer(index: int) -> PreNormBlock:
        attended = attention(config, index, build, fused="qkv_proj", window=window)
        return block(config, index, build, attended, mlp(config, index, build, fused="gate_up_proj"))

    return assemble(config, build, layer)
