"""GLM-4 of 2024: Llama's layer with neighbours rotated in a part of each head, gate and up in one tensor."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp


def decoder(config: Config, build: Build) -> Decoder:
    """Biases of q, k and v where the configuration asks for them."""

    def layer(index: int) -> PreNormBlock:
        attended = attention(config, index, build, **options(config, build))
        return block(config, index, build, attended, mlp(config, index, build, fused="gate_up_proj"))

    return assemble(config, build, layer)


def options(config: Config, build: Build) -> dict[str, Any]:
    """Of `Attention`, in all models of the GLM-4 series."""
    rope = build.rope(replace(config.rope(), interleaved=True))
    return {"bias": config.flag("attention_bias"), "rope": rope}
