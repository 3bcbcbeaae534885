"""Bloom (arXiv 2211.05100): ALiBi (arXiv 2108.12409) and normalised embeddings."""

from __future__ import annotations

from torch import nn

from runtime.errors import CheckpointError
from runtime.layers.attention import alibi_slopes
from runtime.layers.build import Build
from runtime.layers.norm import LayerNorm
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer, norms
from runtime.models.gpt_neox import dense_mlp, grouped_attention


def decoder(config: Config, build: Build) -> Decoder:
    """Build Bloom, with biases in all layers.

    Raises CheckpointError if residual connections start after the norm (`apply_residual_connection_post_layernorm`).
    """
    if config.flag("apply_residual_connection_post_layernorm"):
        raise CheckpointError(
            "config.json: apply_residual_connection_post_layernorm is not supported natively: "
            "use --model-impl transformers."
        )
    slopes, norm = alibi_slopes(config.num_heads), norms(config, build, LayerNorm)

    def layer(at: Layer) -> nn.Module:
        attended = grouped_attention(at, "self_attention", bias=True, rope=None, slopes=slopes)
        return at.block(attended, dense_mlp(at, 4 * config.hidden_size), norm=norm)

    return assemble(
        config,
        build,
        layer,
        layers_name="model.h",
        norm=norm("model.ln_f"),
        embedding_name="model.word_embeddings",
        embedding_norm=norm("model.word_embeddings_layernorm"),
    )
