"""OLMo 1 to 3 and OLMoE.

OLMo of early 2024 is Llama's layer with layer norms that have no weights. OLMo 2 has the norms behind attention and
MLP, and q and k normalised over all heads; OLMo 3 windows as well, and angles that are scaled only where there is
none. OLMoE has OLMo 2's attention in Llama's layer, and experts in the place of the MLP.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from runtime.errors import CheckpointError
from runtime.layers.attention import Attention
from runtime.layers.block import PostNormBlock, PreNormBlock
from runtime.layers.build import Build
from runtime.layers.moe import MoE, Routing
from runtime.layers.norm import LayerNorm, RMSNorm
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp, rms_norm
from runtime.models.mixtures import top_k

EPS = 1e-5


def olmo(config: Config, build: Build) -> Decoder:
    """No window. Raises CheckpointError for models that clip q, k and v."""
    check_unclipped(config)
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


def check_unclipped(config: Config) -> None:
    """Raise CheckpointError for a model that clips q, k and v."""
    if config.values.get("clip_qkv") is not None:
        raise CheckpointError(
            "config.json: clip_qkv is not supported natively: use --model-impl transformers."
        )


def olmo2(config: Config, build: Build) -> Decoder:
    """All layers look at all positions."""

    def layer(index: int) -> PostNormBlock:
        return post_norm_block(config, index, build, wide_normed(config, index, build))

    return assemble(config, build, layer)


def wide_normed(config: Config, index: int, build: Build, **options: Any) -> Attention:
    """Attention with norms over all heads of q and of k."""

    def norm(part: str, num_heads: int, axis: str) -> RMSNorm:
        name, size = f"model.layers.{index}.self_attn.{part}_norm", num_heads * config.head_dim
        return RMSNorm(name, size, config.norm_eps, build, axis=axis, unit=config.head_dim)

    bias = config.flag("attention_bias")
    qk_norm = norm("q", config.num_heads, "heads"), norm("k", config.num_kv_heads, "kv_heads")
    return attention(config, index, build, bias=bias, out_bias=bias, qk_norm=qk_norm, **options)


def post_norm_block(config: Config, index: int, build: Build, attended: Attention) -> PostNormBlock:
    """Layer `index` with this attention and an MLP, a norm behind each."""

    norm = partial(rms_norm, config, index, build)
    return PostNormBlock(
        attended,
        norm("post_attention_layernorm"),
        mlp(config, index, build),
        norm("post_feedforward_layernorm"),
        build.kernels,
    )


def olmo3(config: Config, build: Build) -> Decoder:
    """Every fourth layer looks at all positions, the others at the last `sliding_window`."""
    kinds, window = config.layer_types() or [], config.optional_integer("sliding_window")

    def layer(index: int) -> PostNormBlock:
        attended = wide_normed(
            config,
            index,
            build,
            rope=build.rope(config.rope(kinds[index])),
            window=window if kinds[index] == "sliding_attention" else None,
        )
        return post_norm_block(config, index, build, attended)

    return assemble(config, build, layer)


def olmoe(config: Config, build: Build) -> Decoder:
    """All layers look at all positions."""
    check_unclipped(config)
    num_experts = config.integer("num_experts")

    def layer(index: int) -> PreNormBlock:
        experts = MoE(
            f"model.layers.{index}.mlp",
            config.hidden_size,
            config.intermediate_size,
            num_experts,
            config.activation,
            build,
            routing=Routing(top_k(config, num_experts), config.flag("norm_topk_prob")),
        )
        return block(config, index, build, wide_normed(config, index, build), experts)

    return assemble(config, build, layer)
