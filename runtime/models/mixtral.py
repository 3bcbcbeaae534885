"""Mixtral: Mistral's layer with experts in the place of the MLP."""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.moe import ExpertNames
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block
from runtime.models.mixtures import block_sparse

NAMES = ExpertNames(gate="experts.{}.w1.weight", up="experts.{}.w3.weight", down="experts.{}.w2.weight")


def decoder(config: Config, build: Build) -> Decoder:
    """All layers look at the last `sliding_window` positions, if there is a window."""
    window = config.optional_integer("sliding_window")

    def layer(index: int) -> PreNormBlock:
        experts = block_sparse(config, index, build, NAMES)
        return block(config, index, build, attention(config, index, build, window=window), experts)

    return assemble(config, build, layer)
