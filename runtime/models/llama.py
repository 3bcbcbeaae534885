"""Llama and the many models of its shape."""

from __future__ import annotations

from torch import nn

from runtime.layers.attention import Attention
from runtime.layers.block import PreNormBlock
from runtime.layers.mlp import GatedMLP
from runtime.layers.norm import RMSNorm
from runtime.models.config import Config
from runtime.models.decoder import Build


def layer(config: Config, index: int, build: Build) -> PreNormBlock:
    """Biases where the configuration asks for them, no window."""
    bias = config.flag("attention_bias")
    return block(config, index, build, qkv_bias=bias, out_bias=bias, mlp_bias=config.flag("mlp_bias"))


def block(
    config: Config,
    index: int,
    build: Build,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    window: int | None = None,
    mlp: nn.Module | None = None,
) -> PreNormBlock:
    """The layer of this family and its relatives, with their differences as switches; `mlp` in place of its own."""
    name, size, eps, kernels = f"model.layers.{index}", config.hidden_size, config.norm_eps, build.kernels
    attention = Attention(
        f"{name}.self_attn",
        size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        kernels,
        rope=build.rope(config.rope()),
        bias=qkv_bias,
        out_bias=out_bias,
        qk_norm_eps=eps if qk_norm else None,
        window=window,
    )
    if mlp is None:
        width, activation = config.intermediate_size, config.activation
        mlp = GatedMLP(f"{name}.mlp", size, width, activation, kernels, bias=mlp_bias)
    return PreNormBlock(
        RMSNorm(f"{name}.input_layernorm", size, eps, kernels),
        attention,
        RMSNorm(f"{name}.post_attention_layernorm", size, eps, kernels),
        mlp,
    )
