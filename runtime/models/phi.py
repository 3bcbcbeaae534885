"""Phi-1, 1.5 and 2: attention and MLP beside each other behind one norm, biases everywhere, partial rotation."""

from __future__ import annotations

from runtime.layers.block import ParallelBlock
from runtime.layers.build import Build
from runtime.layers.norm import LayerNorm
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, plain_mlp


def decoder(config: Config, build: Build) -> Decoder:
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
