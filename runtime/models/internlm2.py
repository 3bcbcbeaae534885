"""InternLM 2: Llama's layer, with the queries, key and value of each kv head beside each other in one tensor."""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp


def decoder(config: Config, build: Build) -> Decoder:
    """Biases of attention where the configuration asks for them."""
    bias = config.flag("attention_bias")

    def layer(index: int) -> PreNormBlock:
        attended = attention(config, index, build, bias=bias, out_bias=bias, fused="wqkv", by_group=True)
        return block(config, index, build, attended, mlp(config, index, build))

    return assemble(config, build, layer)
