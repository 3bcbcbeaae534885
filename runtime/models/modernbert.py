"""ModernBERT (arXiv 2412.13663): rotary embedding, norms before attention and MLP, a window in most layers."""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.encoder import EncoderAttention, EncoderEmbedding
from runtime.layers.mlp import GatedMLP
from runtime.layers.norm import LayerNorm, NoNorm
from runtime.layers.score import ScoreLayer
from runtime.layers.weight import SubLayer, in_one_tensor
from runtime.modeling.config import Config
from runtime.modeling.encoder import Encoder
from runtime.modeling.spellings import FULL


def decoder(config: Config, build: Build) -> Encoder:
    """Build ModernBERT. The first layer has no attention norm, because the embedding ends with a norm."""
    size = config.hidden_size
    embeddings = EncoderEmbedding(
        "embeddings",
        config.vocab_size,
        0,
        size,
        norm("embeddings.norm", config, build),
        build,
        words="tok_embeddings",
    )
    layers = [layer(config, index, build) for index in range(config.num_layers)]
    return Encoder(embeddings, layers, size, final_norm=norm("final_norm", config, build), scores=scores(config))


def layer(config: Config, index: int, build: Build) -> PreNormBlock:
    name, size, bias = f"layers.{index}", config.hidden_size, config.flag("attention_bias")
    kind = (config.layer_types() or [FULL] * config.num_layers)[index]
    qkv = [SubLayer(part, size) for part in ("q", "k", "v")]
    attention = EncoderAttention(
        in_one_tensor(f"{name}.attn.Wqkv", qkv),
        SubLayer(f"{name}.attn.Wo", size),
        config.num_heads,
        build,
        bias=bias,
        rope=build.rope(config.rope(kind)),
        reach=None if kind == FULL else config.integer("local_attention") // 2,
    )
    mlp = GatedMLP(
        f"{name}.mlp",
        size,
        config.intermediate_size,
        config.activation,
        build,
        bias=config.flag("mlp_bias"),
        fused="Wi",
    )
    attention_norm = norm(f"{name}.attn_norm", config, build) if index else NoNorm()
    return PreNormBlock(attention_norm, attention, norm(f"{name}.mlp_norm", config, build), mlp)


def norm(name: str, config: Config, build: Build) -> LayerNorm:
    return LayerNorm(name, config.hidden_size, config.norm_eps, build, bias=config.flag("norm_bias"))


def scores(config: Config) -> tuple[ScoreLayer, ...]:
    """Return the layers of a classifier's head: a dense layer with a norm, then the score layer."""
    if not config.labels:
        return ()
    dense = ScoreLayer(
        "head.dense",
        config.hidden_size,
        bias=config.flag("classifier_bias"),
        activation="gelu",
        norm="head.norm",
        norm_eps=config.norm_eps,
    )
    return dense, ScoreLayer("classifier", len(config.labels))
