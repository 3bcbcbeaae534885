"""Qwen 3: Llama's layer with q and k normalised per head, windows as in Qwen 2."""

from __future__ import annotations

from runtime.layers.attention import Attention
from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.norm import RMSNorm
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp
from runtime.models.qwen2 import window


def decoder(config: Config, build: Build) -> Decoder:
    """Windows as in Qwen 2."""

    def layer(index: int) -> PreNormBlock:
        attended = normed_attention(config, index, build, window(config, index))
        return block(config, index, build, attended, mlp(config, index, build))

    return assemble(config, build, layer)


def normed_attention(config: Config, index: int, build: Build, window: int | None) -> Attention:
    """One switch for the biases of all four projections."""
    bias = config.flag("attention_bias")
    qk_norm = head_norms(config, index, build)
    return attention(config, index, build, bias=bias, out_bias=bias, qk_norm=qk_norm, window=window)


def head_norms(
    config: Config, index: int, build: Build, *, unit_offset: bool = False
) -> tuple[RMSNorm, RMSNorm]:
    """The norms of q and k, of each head."""
    name, size, eps = f"model.layers.{index}.self_attn", config.head_dim, config.norm_eps
    q_norm, k_norm = (
        RMSNorm(f"{name}.{part}_norm", size, eps, build, unit_offset=unit_offset) for part in ("q", "k")
    )
    return q_norm, k_norm
