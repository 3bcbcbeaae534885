"""StableLM: Llama's layer with layer norms, a part of each head rotated, and sometimes all of it in parallel."""

from __future__ import annotations

from torch import nn

from runtime.layers.attention import Attention
from runtime.layers.block import ParallelBlock, PreNormBlock
from runtime.layers.build import Build
from runtime.layers.norm import LayerNorm
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, mlp


def decoder(config: Config, build: Build) -> Decoder:
    """Attention and MLP one after the other, or beside each other (`use_parallel_residual`)."""

    def norm(name: str) -> LayerNorm:
        return LayerNorm(name, config.hidden_size, config.norm_eps, build)

    def layer(index: int) -> nn.Module:
        name, attended = f"model.layers.{index}", _attention(config, index, build)
        first, inner = norm(f"{name}.input_layernorm"), mlp(config, index, build)
        if config.flag("use_parallel_residual"):
            return ParallelBlock(first, attended, inner, build.kernels)
        return PreNormBlock(first, attended, norm(f"{name}.post_attention_layernorm"), inner)

    return assemble(config, build, layer, norm=norm("model.norm"))


def _attention(config: Config, index: int, build: Build) -> Attention:
    qk_norm = None
    if config.flag("qk_layernorm"):

        def norm(part: str, heads: int) -> LayerNorm:
            name = f"model.layers.{index}.self_attn.{part}_layernorm.norms.{{}}"
            return LayerNorm(name, config.head_dim, config.norm_eps, build, bias=False, heads=heads)

        qk_norm = norm("q", config.num_heads), norm("k", config.num_kv_heads).of_kv_heads()
    return attention(config, index, build, bias=config.flag("use_qkv_bias"), qk_norm=qk_norm)
