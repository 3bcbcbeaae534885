"""Baichuan and Baichuan 2: Llama's layer, with queries, keys and values in one tensor (arXiv 2309.10305).

Baichuan 2 compares hidden states with vectors of length one. The models of 13B rotate nothing: scores lose by distance
(ALiBi, arXiv 2108.12409).
"""

from __future__ import annotations

from typing import Any

from runtime.layers.attention import alibi_slopes
from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp


def decoder(config: Config, build: Build) -> Decoder:
    """No biases, as many heads of keys as of queries; with `alibi` that of 13B."""
    place: dict[str, Any] = {}
    if config.flag("alibi"):
        place = {"rope": None, "slopes": alibi_slopes(config.num_heads)}

    def layer(index: int) -> PreNormBlock:
        attended = attention(config, index, build, fused="W_pack", **place)
        return block(config, index, build, attended, mlp(config, index, build))

    return assemble(config, build, layer, unit_head=config.flag("unit_head"))
