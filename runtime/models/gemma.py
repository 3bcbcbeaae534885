"""Gemma 1 and 2, and the text model of Gemma 3.

Gemma is Llama's layer with norms that scale by 1 + weight, and embeddings scaled by the square root of their size.
Gemma 2 adds norms after attention and MLP, soft caps on scores and logits, and sliding windows. Gemma 3 normalises q
and k per head instead of capping scores, and its sliding-window layers have their own rotary embedding.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from runtime.errors import CheckpointError
from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.norm import RMSNorm
from runtime.modeling.config import ACTIVATIONS, Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer, norms


def gemma(config: Config, build: Build) -> Decoder:
    """Build Gemma 1. All layers have full attention."""
    check_causal(config)
    activation, norm = config.activation, norms(config, build, RMSNorm, unit_offset=True)
    if activation == "gelu":
        activation = "gelu_tanh"  # the first checkpoints say gelu but were trained with gelu_tanh

    def layer(at: Layer) -> nn.Module:
        return at.block(at.attention(), at.mlp(activation=activation), norm=norm)

    return assemble(config, build, layer, norm=norm("model.norm"), embedding_scale=config.hidden_size**0.5)


def check_causal(config: Config) -> None:
    """Raise CheckpointError for encoders of this family, which have bidirectional attention."""
    if config.flag("use_bidirectional_attention"):
        raise CheckpointError("config.json: use_bidirectional_attention is not supported.")


def gemma2(config: Config, build: Build) -> Decoder:
    """Build Gemma 2. Every other layer has a window, starting with the first layer."""
    return sandwiched(config, build, lambda at: {})


def sandwiched(config: Config, build: Build, options: Callable[[Layer], dict[str, Any]]) -> Decoder:
    """Return a decoder with norms before and after attention and MLP.

    `options` returns further arguments of a layer's `Attention`. `layer_types` says which layers have a window; if it
    is missing, every other layer has one, starting with the first layer.
    """
    check_causal(config)
    activation = config.choice("hidden_activation", [*ACTIVATIONS], default="gelu_pytorch_tanh")
    windows = config.windows(["sliding_attention", "full_attention"] * config.num_layers)
    soft_cap = config.optional_number("attn_logit_softcapping")
    scale = config.number("query_pre_attn_scalar") ** -0.5

    def layer(at: Layer) -> nn.Module:
        norm = partial(at.norm, unit_offset=True)
        return PreNormBlock(
            norm("input_layernorm"),
            at.attention(window=windows[at.index], scale=scale, soft_cap=soft_cap, **options(at)),
            norm("pre_feedforward_layernorm"),
            at.mlp(activation=ACTIVATIONS[activation]),
            post_attention_norm=norm("post_attention_layernorm"),
            post_mlp_norm=norm("post_feedforward_layernorm"),
        )

    return assemble(
        config,
        build,
        layer,
        norm=norms(config, build, RMSNorm, unit_offset=True)("model.norm"),
        embedding_scale=config.hidden_size**0.5,
        soft_cap=config.optional_number("final_logit_softcapping"),
    )


def gemma3(config: Config, build: Build) -> Decoder:
    """Build Gemma 3. Every sixth layer has full attention; the other layers have a window."""
    kinds = config.layer_types() or []

    def options(at: Layer) -> dict[str, Any]:
        return {"qk_norm": at.head_norms(unit_offset=True), "rope": build.rope(config.rope(kinds[at.index]))}

    return sandwiched(config, build, options)
