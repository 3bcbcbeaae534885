"""Mistral and Ministral: Llama's layer without biases, optionally with a window. Mixtral has experts, not MLPs."""

from __future__ import annotations

from torch import nn

from runtime.layers.build import Build
from runtime.layers.moe import ExpertNames
from runtime.layers.rope import QueryScale
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer
from runtime.modeling.mixtures import block_sparse

NAMES = ExpertNames(gate="experts.{}.w1.weight", up="experts.{}.w3.weight", down="experts.{}.w2.weight")


def mistral(config: Config, build: Build) -> Decoder:
    """Build Mistral or Ministral.

    The sliding layers that `layer_types` lists have a window of `sliding_window` positions. If `layer_types` is
    missing, all layers have this window.
    """
    windows, scale = config.windows(["sliding_attention"] * config.num_layers), query_scale(config, build)

    def layer(at: Layer) -> nn.Module:
        return at.block(at.attention(bias=False, window=windows[at.index], query_scale=scale), at.mlp())

    return assemble(config, build, layer)


def query_scale(config: Config, build: Build) -> QueryScale | None:
    """Return the scaling of queries beyond the trained context (Ministral 3), or None."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = config.child(name)
        strength = rope.optional_number("llama_4_scaling_beta", above=-1.0)
        if strength is not None:
            trained = rope.integer("original_max_position_embeddings")
            return QueryScale(strength, trained, build.context_length, build.kernels, build.device)
    return None


def mixtral(config: Config, build: Build) -> Decoder:
    """Build Mixtral. All layers have a window if config.json has `sliding_window`."""
    window = config.optional_integer("sliding_window")

    def layer(at: Layer) -> nn.Module:
        return at.block(at.attention(bias=False, window=window), block_sparse(at, NAMES))

    return assemble(config, build, layer)
