"""Gemma 2: Gemma with norms behind attention and MLP as well, bounded scores and logits, and windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.norm import RMSNorm
from runtime.models.config import ACTIVATIONS, Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.gemma import check_causal
from runtime.models.llama import attention, mlp


def decoder(config: Config, build: Build) -> Decoder:
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
        def norm(name: str) -> RMSNorm:
            prefix = f"model.layers.{index}.{name}"
            return RMSNorm(prefix, config.hidden_size, config.norm_eps, build, unit_offset=True)

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
