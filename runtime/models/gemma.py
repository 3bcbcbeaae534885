"""Gemma 1 to 3, of the last the text part.

Gemma is Llama's layer with norms that scale by 1 + weight, and vectors scaled by the root of their size. Gemma 2 has
norms behind attention and MLP as well, bounded scores and logits, and windows. Gemma 3 normalises q and k per head
instead of bounding scores, and has angles of its own where there is a window.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from runtime.errors import CheckpointError
from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.models.config import ACTIVATIONS, Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp, rms_norm
from runtime.models.qwen3 import head_norms


def gemma(config: Config, build: Build) -> Decoder:
    """All layers look at all positions."""
    check_causal(config)
    bias, activation = config.flag("attention_bias"), config.activation
    if activation == "gelu":
        activation = "gelu_tanh"  # what the first checkpoints mean by it

    def layer(index: int) -> PreNormBlock:
        attended = attention(config, index, build, bias=bias, out_bias=bias)
        inner = mlp(config, index, build, activation=activation)
        return block(config, index, build, attended, inner, unit_offset=True)

    return assemble(config, build, layer, unit_offset=True, embedding_scale=config.hidden_size**0.5)


def check_causal(config: Config) -> None:
    """Raise CheckpointError for an encoder made of this family, whose tokens look at later ones."""
    if config.flag("use_bidirectional_attention"):
        raise CheckpointError("config.json: use_bidirectional_attention is not supported.")


def gemma2(config: Config, build: Build) -> Decoder:
    """Every other layer looks at the last `sliding_window` positions, from the first one on."""
    kinds = config.layer_types() or ["sliding_attention", "full_attention"] * config.num_layers
    return sandwiched(config, build, kinds, lambda index: {})


def sandwiched(
    config: Config, build: Build, kinds: list[str], options: Callable[[int], dict[str, Any]]
) -> Decoder:
    """Layers with norms on both sides of attention and MLP, each of its kind, with further options of `Attention`."""
    check_causal(config)
    bias = config.flag("attention_bias")
    activation = config.choice("hidden_activation", [*ACTIVATIONS], default="gelu_pytorch_tanh")
    window = config.optional_integer("sliding_window")
    soft_cap = config.optional_number("attn_logit_softcapping")
    scale = config.number("query_pre_attn_scalar") ** -0.5

    def layer(index: int) -> PreNormBlock:
        norm = partial(rms_norm, config, index, build, unit_offset=True)
        attended = attention(
            config,
            index,
            build,
            bias=bias,
            out_bias=bias,
            window=window if kinds[index] == "sliding_attention" else None,
            scale=scale,
            soft_cap=soft_cap,
            **options(index),
        )
        return PreNormBlock(
            norm("input_layernorm"),
            attended,
            norm("pre_feedforward_layernorm"),
            mlp(config, index, build, activation=ACTIVATIONS[activation]),
            post_attention_norm=norm("post_attention_layernorm"),
            post_mlp_norm=norm("post_feedforward_layernorm"),
        )

    return assemble(
        config,
        build,
        layer,
        unit_offset=True,
        embedding_scale=config.hidden_size**0.5,
        soft_cap=config.optional_number("final_logit_softcapping"),
    )


def gemma3(config: Config, build: Build) -> Decoder:
    """Every sixth layer looks at all positions, the others at the last `sliding_window`."""
    kinds = config.layer_types() or []

    def options(index: int) -> dict[str, Any]:
        qk_norm = head_norms(config, index, build, unit_offset=True)
        return {"qk_norm": qk_norm, "rope": build.rope(config.rope(kinds[index]))}

    return sandwiched(config, build, kinds, options)
