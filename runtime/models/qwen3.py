"""Qwen 3: Llama's layer with q and k normalised per head, windows as in Qwen 2; with experts for most MLPs or none."""

from __future__ import annotations

from runtime.layers.attention import Attention
from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.moe import MoE, Routing
from runtime.layers.norm import RMSNorm
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp
from runtime.models.mixtures import top_k
from runtime.models.qwen2 import has_experts, window


def qwen3(config: Config, build: Build) -> Decoder:
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


def qwen3_moe(config: Config, build: Build) -> Decoder:
    """The window, if there is one, is that of all layers."""
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window") else None

    def layer(index: int) -> PreNormBlock:
        inner = experts if has_experts(config, index) else mlp
        attended = normed_attention(config, index, build, window)
        return block(config, index, build, attended, inner(config, index, build))

    return assemble(config, build, layer)


def experts(config: Config, index: int, build: Build) -> MoE:
    """The mixture of layer `index`."""
    # Two spellings; the older one is that of the published checkpoints.
    num_experts = config.optional_integer("num_experts") or config.integer("num_local_experts")
    return MoE(
        f"model.layers.{index}.mlp",
        config.hidden_size,
        config.integer("moe_intermediate_size"),
        num_experts,
        config.activation,
        build,
        routing=Routing(top_k(config, num_experts), config.flag("norm_topk_prob")),
    )
