"""Falcon (arXiv 2311.16867): attention and MLP in parallel.

Attention and MLP share one norm, or (in Falcon-40B and 180B) have one norm each. The RefinedWeb models (Falcon-RW)
compute attention and MLP in sequence and use ALiBi (arXiv 2108.12409), whose bias is added before scores are scaled.
transformers rounds the bias to bfloat16; this code does not.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from runtime.layers.attention import alibi_slopes
from runtime.layers.block import ParallelBlock
from runtime.layers.build import Build
from runtime.layers.norm import LayerNorm
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer, norms
from runtime.models.gpt_neox import dense_mlp, grouped_attention


def decoder(config: Config, build: Build) -> Decoder:
    """Build Falcon.

    Attention is grouped-query with `new_decoder_architecture`, multi-query with `multi_query`, else multi-head.
    """
    bias, grouped = config.flag("bias"), config.flag("new_decoder_architecture")
    two_norms = grouped and (config.optional_integer("num_ln_in_parallel_attn") or 2) == 2
    options: dict[str, Any] = {}
    if config.flag("alibi"):
        slopes = [slope * config.head_dim**-0.5 for slope in alibi_slopes(config.num_heads)]
        options = {"rope": None, "slopes": slopes}
    norm = norms(config, build, LayerNorm)

    def layer(at: Layer) -> nn.Module:
        attended = grouped_attention(at, "self_attention", bias=bias, **options)
        size = config.optional_integer("ffn_hidden_size") or 4 * config.hidden_size
        inner = dense_mlp(at, size, bias=bias)
        if two_norms:
            mlp_norm = norm(f"{at.name}.ln_mlp")
            return ParallelBlock(norm(f"{at.name}.ln_attn"), attended, inner, build.kernels, mlp_norm=mlp_norm)
        if grouped or config.flag("parallel_attn", default=True):
            return ParallelBlock(norm(f"{at.name}.input_layernorm"), attended, inner, build.kernels)
        return at.block(attended, inner, norm=norm)

    ln_f, embedding_name = norm("model.ln_f"), "model.word_embeddings"
    return assemble(config, build, layer, layers_name="model.h", norm=ln_f, embedding_name=embedding_name)
