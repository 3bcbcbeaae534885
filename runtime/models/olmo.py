"""OLMo of early 2024: Llama's layer with layer norms that have no weights."""

from __future__ import annotations

from runtime.errors import CheckpointError
from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.norm import LayerNorm
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, mlp

EPS = 1e-5


def decoder(config: Config, build: Build) -> Decoder:
    """No window. Raises CheckpointError for models that clip q, k and v."""
    if config.values.get("clip_qkv") is not None:
        raise CheckpointError(
            "config.json: clip_qkv is not supported natively: use --model-impl transformers."
        )
    bias = config.flag("attention_bias")

    def norm(name: str) -> LayerNorm:
        return LayerNorm(name, config.hidden_size, EPS, build, weight=False, bias=False)

    def layer(index: int) -> PreNormBlock:
        name = f"model.layers.{index}"
        return PreNormBlock(
            norm(f"{name}.input_layernorm"),
            attention(config, index, build, bias=bias, out_bias=bias),
            norm(f"{name}.post_attention_layernorm"),
            mlp(config, index, build),
        )

    return assemble(config, build, layer, norm=norm("model.norm"))
