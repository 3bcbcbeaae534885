"""Gemma: Llama's layer with norms that scale by 1 + weight, and vectors scaled by the root of their size."""

from __future__ import annotations

from runtime.errors import CheckpointError
from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp


def decoder(config: Config, build: Build) -> Decoder:
    """All layers look at all positions."""
    check_causal(config)
    bias, activation = config.flag("attention_bias"), config.activation
    if activation == "gelu":
        activation = "gelu_tanh"  # what the first checkpoints mean by it

    def layer(index: int) -> PreNormBlock:
        attended = attention(config, index, build, bias=bias, out_bias=bias)
        inner = mlp(config, index, build, activation=activation)
        return block(config, index, build, attended, inner, unit_offset=True)

    return assemble(config, build, layer, unit_offset=True, embedding_scale=config.hidden_size**0.5)


def check_causal(config: Config) -> None:
    """Raise CheckpointError for an encoder made of this family, whose tokens look at later ones."""
    if config.flag("use_bidirectional_attention"):
        raise CheckpointError("config.json: use_bidirectional_attention is not supported.")
