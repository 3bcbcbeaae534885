"""Dense Hunyuan models: Llama's layer with q and k normalised per head after the rotation.

In their config.json the rope type "dynamic" means that `alpha` enlarges the rotary base, for every context length.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from runtime.layers.build import Build
from runtime.layers.rope_parameters import RopeParameters
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer


def decoder(config: Config, build: Build) -> Decoder:
    """Build Hunyuan. `attention_bias` sets the biases of q, k, v and the output projection."""
    rope = build.rope(stretched(config))

    def layer(at: Layer) -> nn.Module:
        qk_norm = at.head_norms(("query_layernorm", "key_layernorm"))
        attended = at.attention(rope=rope, qk_norm=qk_norm, norm_last=True)
        return at.block(attended, at.mlp())

    return assemble(config, build, layer)


def stretched(config: Config) -> RopeParameters:
    """Return the rope parameters of all layers, with a larger base if config.json has an `alpha`."""
    rope = config.rope()
    for name in ("rope_parameters", "rope_scaling"):
        alpha = config.child(name).optional_number("alpha")
        if alpha is not None and rope.kind == "dynamic":
            return replace(rope, kind="default", theta=rope.theta * alpha ** (rope.dim / (rope.dim - 2)))
    return rope
