"""Llama-Nemotron (DeciLM): Llama's layers after an architecture search.

The search removed attention or MLP from some layers, and made some MLPs narrower.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from runtime.config.fields import Fields
from runtime.errors import CheckpointError
from runtime.layers.block import Identity, PreNormBlock, SubLayerBlock
from runtime.layers.build import Build
from runtime.modeling.config import ACTIVATIONS, Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer

MULTIPLE = 256  # an MLP size that is stated as a factor is rounded up to a multiple of this


def decoder(config: Config, build: Build) -> Decoder:
    """Build Llama-Nemotron. `block_configs` has the settings of attention and MLP for each layer."""
    blocks = config.values["block_configs"]

    def layer(at: Layer) -> nn.Module:
        block = blocks[at.index]
        attended = None if part(block, "attention").flag("no_op") else at.attention()
        inner = None if part(block, "ffn").flag("no_op") else mlp(at, part(block, "ffn"))
        before, between = at.norm("input_layernorm"), at.norm("post_attention_layernorm")
        if attended is not None and inner is not None:
            return PreNormBlock(before, attended, between, inner)
        if attended is not None:
            return SubLayerBlock(before, attended)
        return Identity() if inner is None else SubLayerBlock(between, inner)

    return assemble(config, build, layer)


def part(block: Mapping[str, Any], name: str) -> Fields:
    """Return a layer's settings for "attention" or "ffn". Raises CheckpointError if a linear layer replaces it."""
    fields = Fields(block, "config.json: block_configs: ").child(name)
    if fields.flag("replace_with_linear"):
        raise CheckpointError("config.json: block_configs: replace_with_linear is not supported.")
    return fields


def mlp(at: Layer, fields: Fields) -> nn.Module:
    """Return the MLP of a layer. `fields` state its inner size, or the size as a factor of the hidden size."""
    size, factor = fields.optional_integer("intermediate_size"), fields.optional_number("ffn_mult")
    if size is None and factor is None:
        raise CheckpointError("config.json: block_configs: ffn needs intermediate_size or ffn_mult.")
    if size is None:
        size = -(-int(2 * (factor or 0) * at.config.hidden_size / 3) // MULTIPLE) * MULTIPLE
    activation = ACTIVATIONS[fields.choice("hidden_act", list(ACTIVATIONS), default="silu")]
    return at.mlp(size, activation=activation, bias=at.config.flag("mlp_bias"))
