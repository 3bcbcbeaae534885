"""Cohere's models: attention and MLP beside each other, neighbours rotated, logits scaled.

Command R and R+ are Cohere, Command R7B, Command A and Aya of 2024 on Cohere 2: windows with rotation, and layers
with neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from runtime.layers.block import ParallelBlock
from runtime.layers.build import Build
from runtime.layers.norm import LayerNorm
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, mlp


def cohere(config: Config, build: Build) -> Decoder:
    """With norms of q and k, a weight for each head, where the configuration asks for them."""

    def options(index: int) -> dict[str, Any]:
        if not config.flag("use_qk_norm"):
            return {}

        def norm(part: str, heads: int) -> LayerNorm:
            name = f"model.layers.{index}.self_attn.{part}_norm"
            return LayerNorm(name, config.head_dim, config.norm_eps, build, bias=False, heads=heads)

        return {"qk_norm": (norm("q", config.num_heads), norm("k", config.num_kv_heads).of_kv_heads())}

    return beside(config, build, options)


def beside(config: Config, build: Build, options: Callable[[int], dict[str, Any]]) -> Decoder:
    """Layers of Cohere's kind, each with further options of `Attention`."""
    bias, rope = config.flag("attention_bias"), build.rope(replace(config.rope(), interleaved=True))

    def norm(name: str) -> LayerNorm:
        return LayerNorm(name, config.hidden_size, config.norm_eps, build, bias=False)

    def layer(index: int) -> ParallelBlock:
        own = {"rope": rope, "bias": bias, "out_bias": bias, **options(index)}
        return ParallelBlock(
            norm(f"model.layers.{index}.input_layernorm"),
            attention(config, index, build, **own),
            mlp(config, index, build),
            build.kernels,
        )

    return assemble(
        config, build, layer, norm=norm("model.norm"), logits_scale=config.optional_number("logit_scale")
    )


def cohere2(config: Config, build: Build) -> Decoder:
    """Layers without a window do not rotate."""
    kinds, window = config.layer_types() or [], config.optional_integer("sliding_window")

    def options(index: int) -> dict[str, Any]:
        if window is not None and kinds[index] == "sliding_attention":
            return {"window": window}
        return {"rope": None}

    return beside(config, build, options)
