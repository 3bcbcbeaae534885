"""Mistral and Ministral: Llama's layer without biases, in a window if there is one. Mixtral has experts for the MLP."""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.moe import ExpertNames
from runtime.layers.rope import QueryScale
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp
from runtime.models.mixtures import block_sparse

NAMES = ExpertNames(gate="experts.{}.w1.weight", up="experts.{}.w3.weight", down="experts.{}.w2.weight")


def mistral(config: Config, build: Build) -> Decoder:
    """All layers, or those that `layer_types` lists, look at the last `sliding_window` positions."""
    window, scale = config.optional_integer("sliding_window"), query_scale(config, build)
    kinds = config.layer_types() or ["sliding_attention"] * config.num_layers

    def layer(index: int) -> PreNormBlock:
        own = window if kinds[index] == "sliding_attention" else None
        attended = attention(config, index, build, window=own, query_scale=scale)
        return block(config, index, build, attended, mlp(config, index, build))

    return assemble(config, build, layer)


def query_scale(config: Config, build: Build) -> QueryScale | None:
    """What queries beyond the trained context are scaled by (Ministral 3), if they are."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.child(name)
        strength = rope.optional_number("llama_4_scaling_beta", above=-1.0)
        if strength is not None:
            trained = rope.integer("original_max_position_embeddings")
            return QueryScale(strength, trained, build.context_length, build.kernels, build.device)
    return None


def mixtral(config: Config, build: Build) -> Decoder:
    """All layers look at the last `sliding_window` positions, if there is a window."""
    window = config.optional_integer("sliding_window")

    def layer(index: int) -> PreNormBlock:
        experts = block_sparse(config, index, build, NAMES)
        return block(config, index, build, attention(config, index, build, window=window), experts)

    return assemble(config, build, layer)
