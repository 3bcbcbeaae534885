"""OLMo 2: Llama's parts with the norms behind them, and q and k normalised over all heads."""

from __future__ import annotations

from typing import Any

from runtime.layers.attention import Attention
from runtime.layers.block import PostNormBlock
from runtime.layers.build import Build
from runtime.layers.norm import RMSNorm
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, mlp


def decoder(config: Config, build: Build) -> Decoder:
    """All layers look at all positions."""

    def layer(index: int) -> PostNormBlock:
        return post_norm_block(config, index, build, wide_normed(config, index, build))

    return assemble(config, build, layer)


def wide_normed(config: Config, index: int, build: Build, **options: Any) -> Attention:
    """Attention with norms over all heads of q and of k."""

    def norm(part: str, num_heads: int, axis: str) -> RMSNorm:
        name, size = f"model.layers.{index}.self_attn.{part}_norm", num_heads * config.head_dim
        return RMSNorm(name, size, config.norm_eps, build, axis=axis, unit=config.head_dim)

    bias = config.flag("attention_bias")
    qk_norm = norm("q", config.num_heads, "heads"), norm("k", config.num_kv_heads, "kv_heads")
    return attention(config, index, build, bias=bias, out_bias=bias, qk_norm=qk_norm, **options)


def post_norm_block(config: Config, index: int, build: Build, attended: Attention) -> PostNormBlock:
    """Layer `index` with this attention and an MLP, a norm behind each."""

    def norm(name: str) -> RMSNorm:
        return RMSNorm(f"model.layers.{index}.{name}", config.hidden_size, config.norm_eps, build)

    return PostNormBlock(
        attended,
        norm("post_attention_layernorm"),
        mlp(config, index, build),
        norm("post_feedforward_layernorm"),
        build.kernels,
    )
