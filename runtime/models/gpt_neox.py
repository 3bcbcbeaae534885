"""GPT-NeoX (Pythia, Dolly, RedPajama): attention and MLP beside each other, each behind a norm of its own."""

from __future__ import annotations

from torch import nn

from runtime.layers.attention import Attention
from runtime.layers.block import ParallelBlock, PreNormBlock
from runtime.layers.build import Build
from runtime.layers.mlp import MLP
from runtime.layers.norm import LayerNorm
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble


def decoder(config: Config, build: Build) -> Decoder:
    """One after the other where `use_parallel_residual` is false."""
    bias, rope = config.flag("attention_bias", default=True), build.rope(config.rope())

    def norm(name: str) -> LayerNorm:
        return LayerNorm(f"model.{name}", config.hidden_size, config.norm_eps, build)

    def layer(index: int) -> nn.Module:
        name = f"layers.{index}"
        attended = Attention(
            f"model.{name}.attention",
            index,
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            build,
            rope=rope,
            bias=bias,
            out_bias=bias,
            fused="query_key_value",
            by_group=True,
            out_name="dense",
        )
        inner = MLP(
            f"model.{name}.mlp",
            config.hidden_size,
            config.intermediate_size,
            config.activation,
            build,
            names=("dense_h_to_4h", "dense_4h_to_h"),
            bias=True,
        )
        first, second = norm(f"{name}.input_layernorm"), norm(f"{name}.post_attention_layernorm")
        if config.flag("use_parallel_residual", default=True):
            return ParallelBlock(first, attended, inner, build.kernels, mlp_norm=second)
        return PreNormBlock(first, attended, second, inner)

    return assemble(config, build, layer, norm=norm("final_layer_norm"), embedding_name="model.embed_in")
