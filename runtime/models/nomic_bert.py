"""Nomic BERT (arXiv 2402.01613): BERT with rotary embedding instead of learned positions, gated MLPs, no biases."""

from __future__ import annotations

from runtime.layers.block import NormedSumBlock
from runtime.layers.build import Build
from runtime.layers.encoder import EncoderAttention, EncoderEmbedding
from runtime.layers.mlp import GatedMLP
from runtime.layers.norm import LayerNorm
from runtime.layers.weight import SubLayer, in_one_tensor
from runtime.modeling.config import Config
from runtime.modeling.encoder import Encoder


def decoder(config: Config, build: Build) -> Encoder:
    """Build Nomic BERT. Norms follow attention and MLP."""
    size, types = config.hidden_size, config.optional_integer("type_vocab_size", low=0) or 0
    embeddings = EncoderEmbedding(
        "embeddings", config.vocab_size, 0, size, norm("emb_ln", config, build), build, num_types=types
    )
    return Encoder(embeddings, [layer(config, index, build) for index in range(config.num_layers)], size)


def layer(config: Config, index: int, build: Build) -> NormedSumBlock:
    name, size = f"encoder.layers.{index}", config.hidden_size
    attention = EncoderAttention(
        in_one_tensor(f"{name}.attn.Wqkv", [SubLayer(part, size) for part in ("q", "k", "v")]),
        SubLayer(f"{name}.attn.out_proj", size),
        config.num_heads,
        build,
        bias=False,
        rope=build.rope(config.rope()),
    )
    mlp = GatedMLP(f"{name}.mlp", size, config.intermediate_size, config.activation, build)
    norms = [norm(f"{name}.norm{number}", config, build) for number in (1, 2)]
    return NormedSumBlock(norms[0], attention, norms[1], mlp)


def norm(name: str, config: Config, build: Build) -> LayerNorm:
    return LayerNorm(name, config.hidden_size, config.norm_eps, build)
