"""GLM-4 of 2025 (0414): GLM with norms behind attention and MLP as well."""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.norm import RMSNorm
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.glm import options
from runtime.models.llama import attention, mlp


def decoder(config: Config, build: Build) -> Decoder:
    """Attention as in GLM."""

    def layer(index: int) -> PreNormBlock:
        def norm(name: str) -> RMSNorm:
            return RMSNorm(f"model.layers.{index}.{name}", config.hidden_size, config.norm_eps, build)

        return PreNormBlock(
            norm("input_layernorm"),
            attention(config, index, build, **options(config, build)),
            norm("post_attention_layernorm"),
            mlp(config, index, build, fused="gate_up_proj"),
            post_attention_norm=norm("post_self_attn_layernorm"),
            post_mlp_norm=norm("post_mlp_layernorm"),
        )

    return assemble(config, build, layer)
