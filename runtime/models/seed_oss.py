"""Seed-OSS: Llama's layer with a separate field for the bias of the output projection."""

from __future__ import annotations

from torch import nn

from runtime.layers.build import Build
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer


def decoder(config: Config, build: Build) -> Decoder:
    """Build Seed-OSS. All layers have full attention."""

    def layer(at: Layer) -> nn.Module:
        attended = at.attention(out_bias=config.flag("attention_out_bias"))
        return at.block(attended, at.mlp(bias=config.flag("mlp_bias")))

    return assemble(config, build, layer)
