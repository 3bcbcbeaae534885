"""StarCoder 2: Llama's layer with layer norms, an MLP without a gate, biases, and optionally a window."""

from __future__ import annotations

from torch import nn

from runtime.layers.build import Build
from runtime.layers.norm import LayerNorm
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer, norms


def decoder(config: Config, build: Build) -> Decoder:
    """Build StarCoder 2. All layers have a window if config.json has `sliding_window`."""
    bias, window = config.flag("use_bias", default=True), config.optional_integer("sliding_window")
    norm = norms(config, build, LayerNorm)

    def layer(at: Layer) -> nn.Module:
        attended = at.attention(bias=bias, window=window)
        return at.block(attended, at.plain_mlp(bias=bias, names=("c_fc", "c_proj")), norm=norm)

    return assemble(config, build, layer, norm=norm("model.norm"))
