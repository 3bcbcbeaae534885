"""Phi-1 to 4.

Up to Phi-2 attention and MLP are beside each other behind one norm, with biases everywhere and partial rotation.
Phi-3 and 4 are Llama's layer without biases, q, k and v in one tensor, gate and up as well, in a window if any.
"""

from __future__ import annotations

from runtime.layers.block import ParallelBlock, PreNormBlock
from runtime.layers.build import Build
from runtime.layers.norm import LayerNorm
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp, plain_mlp


def phi(config: Config, build: Build) -> Decoder:
    """With norms of q and k, one for all heads, where the configuration asks for them."""

    def norm(name: str, size: int = config.hidden_size) -> LayerNorm:
        return LayerNorm(name, size, config.norm_eps, build)

    def layer(index: int) -> ParallelBlock:
        name, qk_norm = f"model.layers.{index}", None
        if config.flag("qk_layernorm"):
            q, k = (norm(f"{name}.self_attn.{part}_layernorm", config.head_dim) for part in "qk")
            qk_norm = q, k
        return ParallelBlock(
            norm(f"{name}.input_layernorm"),
            attention(config, index, build, bias=True, out_bias=True, out_name="dense", qk_norm=qk_norm),
            plain_mlp(config, index, build, bias=True, names=("fc1", "fc2")),
            build.kernels,
        )

    return assemble(config, build, layer, norm=norm("model.final_layernorm"), head_bias=True)


def phi3(config: Config, build: Build) -> Decoder:
    """All layers look at the last `sliding_window` positions."""
    window = config.optional_integer("sliding_window")

    def layer(index: int) -> PreNormBlock:
        attended = attention(config, index, build, fused="qkv_proj", window=window)
        return block(config, index, build, attended, mlp(config, index, build, fused="gate_up_proj"))

    return assemble(config, build, layer)
