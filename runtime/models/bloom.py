"""Bloom (arXiv 2211.05100): scores lose by distance (ALiBi, arXiv 2108.12409), and embeddings are normalised."""

from __future__ import annotations

from runtime.errors import CheckpointError
from runtime.layers.attention import alibi_slopes
from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.norm import LayerNorm
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.gpt_neox import dense_mlp, grouped_attention


def decoder(config: Config, build: Build) -> Decoder:
    """Biases everywhere. Raises CheckpointError for models that go on from what is normalised."""
    if config.flag("apply_residual_connection_post_layernorm"):
        raise CheckpointError(
            "config.json: apply_residual_connection_post_layernorm is not supported natively: "
            "use --model-impl transformers."
        )
    slopes = alibi_slopes(config.num_heads)

    def norm(name: str) -> LayerNorm:
        return LayerNorm(name, config.hidden_size, config.norm_eps, build)

    def layer(index: int) -> PreNormBlock:
        name = f"model.h.{index}"
        attended = grouped_attention(
            config, index, build, f"{name}.self_attention", bias=True, rope=None, slopes=slopes
        )
        inner = dense_mlp(config, build, f"{name}.mlp", 4 * config.hidden_size)
        return PreNormBlock(
            norm(f"{name}.input_layernorm"), attended, norm(f"{name}.post_attention_layernorm"), inner
        )

    return assemble(
        config,
        build,
        layer,
        norm=norm("model.ln_f"),
        embedding_name="model.word_embeddings",
        embedding_norm=norm("model.word_embeddings_layernorm"),
    )
