"""Cohere: attention and MLP in parallel, interleaved rotary embedding, scaled logits.

Command R and R+ are Cohere; Command R7B, Command A and Aya since 2024 are Cohere 2. In Cohere 2 some layers have a
window and rotary embedding, and the other layers have neither.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from runtime.layers.block import ParallelBlock
from runtime.layers.build import Build
from runtime.layers.norm import LayerNorm
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer, norms


def cohere(config: Config, build: Build) -> Decoder:
    """Build Cohere. With `use_qk_norm`, q and k have norms with separate weights for each head."""

    def options(at: Layer) -> dict[str, Any]:
        return {"qk_norm": at.norms_of_heads("self_attn.{}_norm")} if config.flag("use_qk_norm") else {}

    return parallel(config, build, options)


def parallel(config: Config, build: Build, options: Callable[[Layer], dict[str, Any]]) -> Decoder:
    """Return a decoder of parallel blocks. `options` returns further arguments of a layer's `Attention`."""
    rope = build.rope(replace(config.rope(), interleaved=True))
    norm = norms(config, build, LayerNorm, bias=False)

    def layer(at: Layer) -> nn.Module:
        attended = at.attention(**{"rope": rope, **options(at)})
        return ParallelBlock(norm(f"{at.name}.input_layernorm"), attended, at.mlp(), build.kernels)

    return assemble(config, build, layer, norm=norm("model.norm"), logits_scale=config.optional_number("logit_scale"))


def cohere2(config: Config, build: Build) -> Decoder:
    """Build Cohere 2. Layers without a window have no rotary embedding."""
    windows = config.windows([])

    def options(at: Layer) -> dict[str, Any]:
        window = windows[at.index]
        return {"rope": None} if window is None else {"window": window}

    return parallel(config, build, options)
