"""Exaone 4: OLMo 2's layer with q and k normalised per head; of the models with windows, only those layers rotate."""

from __future__ import annotations

from runtime.layers.block import PostNormBlock
from runtime.layers.build import Build
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention
from runtime.models.olmo import post_norm_block
from runtime.models.qwen3 import head_norms


def decoder(config: Config, build: Build) -> Decoder:
    """Every fourth layer looks at all positions, the others at the last `sliding_window`, if there is one."""
    window, rope = config.optional_integer("sliding_window"), build.rope(config.rope())
    kinds = config.layer_types() or ["full_attention"] * config.num_layers

    def layer(index: int) -> PostNormBlock:
        local = kinds[index] == "sliding_attention"
        attended = attention(
            config,
            index,
            build,
            qk_norm=head_norms(config, index, build),
            rope=rope if window is None or local else None,
            window=window if local else None,
        )
        return post_norm_block(config, index, build, attended)

    return assemble(config, build, layer)
