"""GPT-NeoX (Pythia, Dolly, RedPajama): attention and MLP beside each other, each behind a norm of its own."""

from __future__ import annotations

from typing import Any

from torch import nn

from runtime.layers.attention import Attention
from runtime.layers.block import ParallelBlock, PreNormBlock
from runtime.layers.build import Build
from runtime.layers.mlp import MLP
from runtime.layers.norm import LayerNorm
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention


def decoder(config: Config, build: Build) -> Decoder:
    """One after the other where `use_parallel_residual` is false."""
    bias = config.flag("attention_bias", default=True)

    def norm(name: str) -> LayerNorm:
        return LayerNorm(f"model.{name}", config.hidden_size, config.norm_eps, build)

    def layer(index: int) -> nn.Module:
        name = f"layers.{index}"
        attended = grouped_attention(config, index, build, f"model.{name}.attention", bias=bias)
        inner = dense_mlp(config, build, f"model.{name}.mlp", config.intermediate_size)
        first, second = norm(f"{name}.input_layernorm"), norm(f"{name}.post_attention_layernorm")
        if config.flag("use_parallel_residual", default=True):
            return ParallelBlock(first, attended, inner, build.kernels, mlp_norm=second)
        return PreNormBlock(first, attended, second, inner)

    return assemble(config, build, layer, norm=norm("final_layer_norm"), embedding_name="model.embed_in")


def grouped_attention(
    config: Config, index: int, build: Build, name: str, *, bias: bool, **options: Any
) -> Attention:
    """Attention with q, k and v in one tensor, where the query heads of a kv head stand before its key and value."""
    return attention(
        config,
        index,
        build,
        name=name,
        bias=bias,
        out_bias=bias,
        fused="query_key_value",
        by_group=True,
        out_name="dense",
        **options,
    )


def dense_mlp(config: Config, build: Build, name: str, size: int, *, bias: bool = True) -> MLP:
    """The MLP without a gate of models with `grouped_attention`."""
    names = ("dense_h_to_4h", "dense_4h_to_h")
    return MLP(name, config.hidden_size, size, config.activation, build, names=names, bias=bias)
