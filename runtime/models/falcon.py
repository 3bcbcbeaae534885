"""Falcon (arXiv 2311.16867): attention and MLP beside each other, with one norm for both, or one for each since 40B.

The models of RefinedWeb (Falcon-RW) compute one after the other and rotate nothing: scores lose by distance (ALiBi,
arXiv 2108.12409), before they are scaled. Transformers rounds what they lose to bfloat16, which is not done here.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from runtime.layers.attention import alibi_slopes
from runtime.layers.block import ParallelBlock, PreNormBlock
from runtime.layers.build import Build
from runtime.layers.norm import LayerNorm
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.gpt_neox import dense_mlp, grouped_attention


def decoder(config: Config, build: Build) -> Decoder:
    """In groups of queries with `new_decoder_architecture`, all sharing a key with `multi_query`, or none."""
    bias, grouped = config.flag("bias"), config.flag("new_decoder_architecture")
    two_norms = grouped and (config.optional_integer("num_ln_in_parallel_attn") or 2) == 2
    place: dict[str, Any] = {}
    if config.flag("alibi"):
        slopes = [slope * config.head_dim**-0.5 for slope in alibi_slopes(config.num_heads)]
        place = {"rope": None, "slopes": slopes}

    def norm(name: str) -> LayerNorm:
        return LayerNorm(name, config.hidden_size, config.norm_eps, build)

    def layer(index: int) -> nn.Module:
        name = f"model.h.{index}"
        attended = grouped_attention(config, index, build, f"{name}.self_attention", bias=bias, **place)
        size = config.optional_integer("ffn_hidden_size") or 4 * config.hidden_size
        inner = dense_mlp(config, build, f"{name}.mlp", size, bias=bias)
        if two_norms:
            mlp_norm = norm(f"{name}.ln_mlp")
            return ParallelBlock(norm(f"{name}.ln_attn"), attended, inner, build.kernels, mlp_norm=mlp_norm)
        before = norm(f"{name}.input_layernorm")
        if grouped or config.flag("parallel_attn", default=True):
            return ParallelBlock(before, attended, inner, build.kernels)
        return PreNormBlock(before, attended, norm(f"{name}.post_attention_layernorm"), inner)

    return assemble(config, build, layer, norm=norm("model.ln_f"), embedding_name="model.word_embeddings")
