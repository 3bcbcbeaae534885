"""StarCoder 2: Llama's layer with layer norms, an MLP without a gate, biases everywhere, in a window if any."""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.norm import LayerNorm
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, plain_mlp


def decoder(config: Config, build: Build) -> Decoder:
    """All layers look at the last `sliding_window` positions."""
    bias, window = config.flag("use_bias", default=True), config.optional_integer("sliding_window")

    def norm(name: str) -> LayerNorm:
        return LayerNorm(name, config.hidden_size, config.norm_eps, build)

    def layer(index: int) -> PreNormBlock:
        name = f"model.layers.{index}"
        return PreNormBlock(
            norm(f"{name}.input_layernorm"),
            attention(config, index, build, bias=bias, out_bias=bias, window=window),
            norm(f"{name}.post_attention_layernorm"),
            plain_mlp(config, index, build, bias=bias, names=("c_fc", "c_proj")),
        )

    return assemble(config, build, layer, norm=norm("model.norm"))
