"""SmolLM3: Llama's layer, every fourth one without rotation."""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp


def decoder(config: Config, build: Build) -> Decoder:
    """`no_rope_layers` holds a 1 for each layer that rotates; layers that do not may have a window."""
    interval = config.optional_integer("no_rope_layer_interval") or 4
    rotates = config.values.get("no_rope_layers")
    if rotates is None:
        rotates = [int((index + 1) % interval != 0) for index in range(config.num_layers)]
    if not isinstance(rotates, list) or len(rotates) < config.num_layers or not set(rotates) <= {0, 1}:
        raise config.wrong("no_rope_layers", f"{config.num_layers} of 0 and 1")
    kinds = config.layer_types() or [
        "full_attention" if rotates[index] else "sliding_attention" for index in range(config.num_layers)
    ]
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window") else None
    bias, mlp_bias = config.flag("attention_bias"), config.flag("mlp_bias")
    rope = build.rope(config.rope())

    def layer(index: int) -> PreNormBlock:
        attended = attention(
            config,
            index,
            build,
            bias=bias,
            out_bias=bias,
            rope=rope if rotates[index] else None,
            window=window if kinds[index] == "sliding_attention" else None,
        )
        return block(config, index, build, attended, mlp(config, index, build, bias=mlp_bias))

    return assemble(config, build, layer)
