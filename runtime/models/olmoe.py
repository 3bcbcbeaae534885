"""OLMoE: Llama's layer with q and k normalised over all heads, and experts in the place of the MLP."""

from __future__ import annotations

from runtime.errors import CheckpointError
from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.moe import MoE, Routing
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import block
from runtime.models.mixtures import top_k
from runtime.models.olmo2 import wide_normed


def decoder(config: Config, build: Build) -> Decoder:
    """All layers look at all positions."""
    if config.values.get("clip_qkv") is not None:
        raise CheckpointError(
            "config.json: clip_qkv is not supported natively: use --model-impl transformers."
        )
    num_experts = config.integer("num_experts")

    def layer(index: int) -> PreNormBlock:
        experts = MoE(
            f"model.layers.{index}.mlp",
            config.hidden_size,
            config.intermediate_size,
            num_experts,
            config.activation,
            build,
            routing=Routing(top_k(config, num_experts), config.flag("norm_topk_prob")),
        )
        return block(config, index, build, wide_normed(config, index, build), experts)

    return assemble(config, build, layer)
