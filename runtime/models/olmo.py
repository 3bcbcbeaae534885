"""OLMo 1 to 3 and OLMoE.

OLMo of early 2024 is Llama's layer with layer norms that have no weights. OLMo 2 has norms after attention and MLP
instead of before them, and normalises q and k over all heads. OLMo 3 adds windows, and scales the rotary embedding only
in layers without a window. OLMoE is Llama's layer with OLMo 2's attention, and with experts instead of the MLP.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from runtime.errors import CheckpointError
from runtime.layers.attention import Attention
from runtime.layers.block import PostNormBlock
from runtime.layers.build import Build
from runtime.layers.moe import Routing
from runtime.layers.norm import LayerNorm, RMSNorm
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer
from runtime.modeling.mixtures import top_k

EPS = 1e-5


def olmo(config: Config, build: Build) -> Decoder:
    """Build OLMo of early 2024. Raises CheckpointError for models that clip q, k and v."""
    check_unclipped(config)

    def norm(name: str) -> LayerNorm:
        return LayerNorm(name, config.hidden_size, EPS, build, weight=False, bias=False)

    def layer(at: Layer) -> nn.Module:
        return at.block(at.attention(), at.mlp(), norm=norm)

    return assemble(config, build, layer, norm=norm("model.norm"))


def check_unclipped(config: Config) -> None:
    """Raise CheckpointError for a model that clips q, k and v."""
    if config.values.get("clip_qkv") is not None:
        raise CheckpointError("config.json: clip_qkv is not supported natively. Use --model-impl transformers.")


def olmo2(config: Config, build: Build) -> Decoder:
    """Build OLMo 2. All layers have full attention."""

    def layer(at: Layer) -> nn.Module:
        return post_norm_block(at, wide_normed(at))

    return assemble(config, build, layer)


def wide_normed(at: Layer, **options: Any) -> Attention:
    """Return attention that normalises q over all its heads, and k over all its heads."""
    config = at.config

    def norm(part: str, num_heads: int, axis: str) -> RMSNorm:
        name, size = f"{at.name}.self_attn.{part}_norm", num_heads * config.head_dim
        return RMSNorm(name, size, config.norm_eps, at.build, axis=axis, unit=config.head_dim)

    qk_norm = norm("q", config.num_heads, "heads"), norm("k", config.num_kv_heads, "kv_heads")
    return at.attention(qk_norm=qk_norm, **options)


def post_norm_block(at: Layer, attended: Attention) -> PostNormBlock:
    """Return a layer that consists of the given attention and an MLP, each followed by a norm."""
    after_attention, after_mlp = at.norm("post_attention_layernorm"), at.norm("post_feedforward_layernorm")
    return PostNormBlock(attended, after_attention, at.mlp(), after_mlp, at.build.kernels)


def olmo3(config: Config, build: Build) -> Decoder:
    """Build OLMo 3. Every fourth layer has full attention; the other layers have a window."""
    kinds, windows = config.layer_types() or [], config.windows([])

    def layer(at: Layer) -> nn.Module:
        rope = build.rope(config.rope(kinds[at.index]))
        return post_norm_block(at, wide_normed(at, rope=rope, window=windows[at.index]))

    return assemble(config, build, layer)


def olmoe(config: Config, build: Build) -> Decoder:
    """Build OLMoE. All layers have full attention."""
    check_unclipped(config)
    num_experts = config.integer("num_experts")
    routing = Routing(top_k(config, num_experts), config.flag("norm_topk_prob"))

    def layer(at: Layer) -> nn.Module:
        return at.block(wide_normed(at), at.experts(config.intermediate_size, num_experts, routing=routing))

    return assemble(config, build, layer)
