"""Mixtral: Mistral's layer with experts in the place of the MLP."""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.moe import ExpertNames, MoE, Routing
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block
from runtime.models.qwen3_moe import top_k

NAMES = ExpertNames(gate="experts.{}.w1.weight", up="experts.{}.w3.weight", down="experts.{}.w2.weight")


def decoder(config: Config, build: Build) -> Decoder:
    """All layers look at the last `sliding_window` positions, if there is a window."""
    window, num_experts = config.optional_integer("sliding_window"), config.integer("num_local_experts")

    def layer(index: int) -> PreNormBlock:
        experts = MoE(
            f"model.layers.{index}.block_sparse_moe",
            config.hidden_size,
            config.intermediate_size,
            num_experts,
            config.activation,
            build,
            routing=Routing(top_k(config, num_experts), renormalise=True),
            names=NAMES,
        )
        return block(config, index, build, attention(config, index, build, window=window), experts)

    return assemble(config, build, layer)
