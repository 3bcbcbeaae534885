"""Baichuan and Baichuan 2 of 7B: Llama's layer, with queries, keys and values in one tensor (arXiv 2309.10305).

Baichuan 2 compares hidden states with vectors of length one. The models of 13B add to scores by distance (ALiBi, arXiv
2108.12409), which no kernel of ours does: `spellings.py` refuses them.
"""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp


def decoder(config: Config, build: Build) -> Decoder:
    """No biases, as many heads of keys as of queries."""

    def layer(index: int) -> PreNormBlock:
        attended = attention(config, index, build, fused="W_pack")
        return block(config, index, build, attended, mlp(config, index, build))

    return assemble(config, build, layer, unit_head=config.flag("unit_head"))
