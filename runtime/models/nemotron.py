"""Nemotron-4 and Minitron: layer norms that scale by 1 + weight, partial rotation, an MLP with squared ReLU."""

from __future__ import annotations

from torch import nn

from runtime.layers.build import Build
from runtime.layers.norm import LayerNorm
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer, norms


def decoder(config: Config, build: Build) -> Decoder:
    """Build Nemotron. config.json says whether attention and MLP have biases. No layer has a window."""
    norm = norms(config, build, LayerNorm, unit_offset=True)

    def layer(at: Layer) -> nn.Module:
        return at.block(at.attention(), at.plain_mlp(bias=config.flag("mlp_bias")), norm=norm)

    return assemble(config, build, layer, norm=norm("model.norm"))
