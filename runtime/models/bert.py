"""BERT, DistilBERT, RoBERTa, XLM-R and MPNet. MPNet adds a relative position bias to attention scores."""

from __future__ import annotations

from runtime.layers.block import NormedSumBlock
from runtime.layers.build import Build
from runtime.layers.encoder import BiasByDistance, EncoderAttention, EncoderEmbedding
from runtime.layers.mlp import MLP
from runtime.layers.norm import LayerNorm
from runtime.layers.score import ScoreLayer
from runtime.layers.weight import SubLayer
from runtime.modeling.config import Config
from runtime.modeling.encoder import Encoder


def decoder(config: Config, build: Build) -> Encoder:
    """Build an encoder like BERT: absolute positions, biases in all layers, and MLPs without gates."""
    size = config.hidden_size
    embeddings = EncoderEmbedding(
        "embeddings",
        config.vocab_size,
        config.integer("max_position_embeddings"),
        size,
        norm("embeddings", config, build),
        build,
        skipped=config.optional_integer("skipped_positions", low=0) or 0,
        num_types=config.optional_integer("type_vocab_size", low=0) or 0,
    )
    buckets = config.optional_integer("relative_attention_num_buckets")
    name = "encoder.relative_attention_bias"
    bias = None if buckets is None else BiasByDistance(name, buckets, config.num_heads)
    layers = [layer(config, index, build, bias) for index in range(config.num_layers)]
    return Encoder(embeddings, layers, size, scores=scores(config))


def scores(config: Config) -> tuple[ScoreLayer, ...]:
    """Return the layers of a classifier's head: a dense layer (in BERT the pretrained pooler) and the score layer."""
    if not config.labels:
        return ()
    size, count = config.hidden_size, len(config.labels)
    if config.architecture.startswith("DistilBert"):
        return ScoreLayer("pre_classifier", size, activation="relu"), ScoreLayer("classifier", count)
    if config.architecture.startswith("Bert"):
        return ScoreLayer("pooler.dense", size, activation="tanh"), ScoreLayer("classifier", count)
    return ScoreLayer("classifier.dense", size, activation="tanh"), ScoreLayer("classifier.out_proj", count)


def layer(config: Config, index: int, build: Build, bias: BiasByDistance | None) -> NormedSumBlock:
    name, size = f"encoder.layer.{index}", config.hidden_size
    attention = EncoderAttention(
        [SubLayer(f"{name}.attention.self.{part}", size) for part in ("query", "key", "value")],
        SubLayer(f"{name}.attention.output.dense", size),
        config.num_heads,
        build,
        bias=True,
        bias_by_distance=bias,
    )
    mlp = MLP(
        name,
        size,
        config.intermediate_size,
        config.activation,
        build,
        names=("intermediate.dense", "output.dense"),
        bias=True,
    )
    attention_norm = norm(f"{name}.attention.output", config, build)
    return NormedSumBlock(attention_norm, attention, norm(f"{name}.output", config, build), mlp)


def norm(name: str, config: Config, build: Build) -> LayerNorm:
    return LayerNorm(f"{name}.LayerNorm", config.hidden_size, config.norm_eps, build)
