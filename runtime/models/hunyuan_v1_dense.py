"""Hunyuan, dense: Llama's layer with q and k normalised per head after they are rotated.

Its files call a base of the angles that `alpha` stretches once and for all "dynamic", as they call NTK-aware scaling.
"""

from __future__ import annotations

from dataclasses import replace

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.norm import RMSNorm
from runtime.layers.rope_parameters import RopeParameters
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp


def decoder(config: Config, build: Build) -> Decoder:
    """One switch for the biases of attention."""
    bias, rope = config.flag("attention_bias"), build.rope(stretched(config))

    def layer(index: int) -> PreNormBlock:
        def norm(part: str) -> RMSNorm:
            name = f"model.layers.{index}.self_attn.{part}_layernorm"
            return RMSNorm(name, config.head_dim, config.norm_eps, build)

        qk_norm = norm("query"), norm("key")
        attended = attention(
            config, index, build, rope=rope, bias=bias, out_bias=bias, qk_norm=qk_norm, norm_last=True
        )
        return block(config, index, build, attended, mlp(config, index, build))

    return assemble(config, build, layer)


def stretched(config: Config) -> RopeParameters:
    """The angles of all layers, of a larger base where there is an `alpha`."""
    rope = config.rope()
    for name in ("rope_parameters", "rope_scaling"):
        alpha = config.child(name).optional_number("alpha")
        if alpha is not None and rope.kind == "dynamic":
            return replace(rope, kind="default", theta=rope.theta * alpha ** (rope.dim / (rope.dim - 2)))
    return rope
