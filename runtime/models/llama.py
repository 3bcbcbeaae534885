"""Llama."""

from __future__ import annotations

from torch import nn

from runtime.layers.build import Build
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer


def decoder(config: Config, build: Build) -> Decoder:
    """Build Llama. config.json says whether attention and MLP have biases. No layer has a window."""

    def layer(at: Layer) -> nn.Module:
        return at.block(at.attention(), at.mlp(bias=config.flag("mlp_bias")))

    return assemble(config, build, layer)
