"""Hunyuan, dense: Llama's layer with q and k normalised per head after they are rotated."""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.norm import RMSNorm
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp


def decoder(config: Config, build: Build) -> Decoder:
    """One switch for the biases of attention."""
    bias = config.flag("attention_bias")

    def layer(index: int) -> PreNormBlock:
        def norm(part: str) -> RMSNorm:
            name = f"model.layers.{index}.self_attn.{part}_layernorm"
            return RMSNorm(name, config.head_dim, config.norm_eps, build)

        qk_norm = norm("query"), norm("key")
        attended = attention(config, index, build, bias=bias, out_bias=bias, qk_norm=qk_norm, norm_last=True)
        return block(config, index, build, attended, mlp(config, index, build))

    return assemble(config, build, layer)
