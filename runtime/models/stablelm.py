"""StableLM: Llama's layer with layer norms, partial rotation, and optionally parallel attention and MLP."""

from __future__ import annotations

from torch import nn

from runtime.layers.block import ParallelBlock
from runtime.layers.build import Build
from runtime.layers.norm import LayerNorm
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer, norms


def decoder(config: Config, build: Build) -> Decoder:
    """Build StableLM. Attention and MLP are in parallel if `use_parallel_residual` is true, else in sequence."""

    norm = norms(config, build, LayerNorm)

    def layer(at: Layer) -> nn.Module:
        qk_norm = None
        if config.flag("qk_layernorm"):
            qk_norm = at.norms_of_heads("self_attn.{}_layernorm.norms.{{}}")
        attended = at.attention(bias=config.flag("use_qkv_bias"), out_bias=False, qk_norm=qk_norm)
        if config.flag("use_parallel_residual"):
            return ParallelBlock(norm(f"{at.name}.input_layernorm"), attended, at.mlp(), build.kernels)
        return at.block(attended, at.mlp(), norm=norm)

    return assemble(config, build, layer, norm=norm("model.norm"))
