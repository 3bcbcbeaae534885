"""SmolLM3: Llama's layer; every fourth layer has no rotary embedding."""

from __future__ import annotations

from torch import nn

from runtime.layers.build import Build
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer


def decoder(config: Config, build: Build) -> Decoder:
    """Build SmolLM3.

    `no_rope_layers` holds 1 for layers with rotary embedding, and 0 for layers without it. Layers without rotary
    embedding may have a window.
    """
    interval = config.optional_integer("no_rope_layer_interval") or 4
    rotates = config.values.get("no_rope_layers")
    if rotates is None:
        rotates = [int((index + 1) % interval != 0) for index in range(config.num_layers)]
    if not isinstance(rotates, list) or len(rotates) < config.num_layers or not set(rotates) <= {0, 1}:
        raise config.wrong("no_rope_layers", f"{config.num_layers} of 0 and 1")
    kinds = ["full_attention" if rotates[index] else "sliding_attention" for index in range(config.num_layers)]
    windows = config.windows(kinds) if config.flag("use_sliding_window") else [None] * config.num_layers
    rope = build.rope(config.rope())

    def layer(at: Layer) -> nn.Module:
        attended = at.attention(rope=rope if rotates[at.index] else None, window=windows[at.index])
        return at.block(attended, at.mlp(bias=config.flag("mlp_bias")))

    return assemble(config, build, layer)
