"""OLMo 3: OLMo 2 with windows, and angles that are scaled only where there is none."""

from __future__ import annotations

from runtime.layers.block import PostNormBlock
from runtime.layers.build import Build
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.olmo2 import post_norm_block, wide_normed


def decoder(config: Config, build: Build) -> Decoder:
    """Every fourth layer looks at all positions, the others at the last `sliding_window`."""
    kinds, window = config.layer_types() or [], config.optional_integer("sliding_window")

    def layer(index: int) -> PostNormBlock:
        attended = wide_normed(
            config,
            index,
            build,
            rope=build.rope(config.rope(kinds[index])),
            window=window if kinds[index] == "sliding_attention" else None,
        )
        return post_norm_block(config, index, build, attended)

    return assemble(config, build, layer)
