"""InternLM 2: Llama's layer with q, k and v in one tensor, ordered by kv head: its query heads, its key, its value."""

from __future__ import annotations

from torch import nn

from runtime.layers.build import Build
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer


def decoder(config: Config, build: Build) -> Decoder:
    """Build InternLM 2. config.json says whether attention has biases."""

    def layer(at: Layer) -> nn.Module:
        return at.block(at.attention(fused="wqkv", by_group=True), at.mlp())

    return assemble(config, build, layer)
