"""Draft heads of EAGLE (arXiv 2401.15077) and EAGLE-3 (arXiv 2503.01840), with the layers of Llama or Qwen 2."""

from __future__ import annotations

from typing import Any

from runtime.config.fields import Fields
from runtime.errors import CheckpointError
from runtime.layers.attention import Attention
from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.norm import NoNorm, RMSNorm
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder
from runtime.modeling.draft_head import DraftHead, Joined, JoinLinear, WideAttentionLayer, small_head
from runtime.modeling.layer import Layer, norms


def eagle(config: Config, build: Build) -> Decoder:
    """Build an EAGLE head: a projection of token and state, then decoder layers without the first and the last norm."""

    def layer(index: int) -> PreNormBlock:
        at = Layer(config, build, index, f"layers.{index}")
        before = at.norm("input_layernorm") if index else NoNorm()
        return PreNormBlock(before, at.attention(out_bias=False), at.norm("post_attention_layernorm"), at.mlp())

    first, *rest = (layer(index) for index in range(config.num_layers))
    projection = JoinLinear("fc", 2 * config.hidden_size, config, build, bias=True)
    return DraftHead([Joined(projection, first, build), *rest], None, config, build)


def eagle3(config: Config, build: Build) -> Decoder:
    """Build an EAGLE-3 head: one layer whose attention reads token and state, and an LM head for frequent tokens."""
    if config.num_layers != 1:
        raise CheckpointError(f"config.json: num_hidden_layers of an EAGLE-3 head must be 1, not {config.num_layers}.")
    at = Layer(config, build, 0, "midlayer")
    bias = config.flag("attention_bias")
    attention = Attention(
        "midlayer.self_attn",
        0,
        2 * config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        build,
        rope=build.rope(config.rope()),
        bias=bias,
        out_bias=bias,
        out_size=config.hidden_size,
    )
    layer = WideAttentionLayer(
        at.norm("input_layernorm"),
        at.norm("hidden_norm"),
        attention,
        at.norm("post_attention_layernorm"),
        at.mlp(bias=config.flag("mlp_bias")),
        build,
    )
    head, token_map = small_head(config, build)
    taps = tapped_layers(config)
    return DraftHead(
        [layer],
        norms(config, build, RMSNorm)("norm"),
        config,
        build,
        head=head,
        token_map=token_map,
        projection=JoinLinear("fc", len(taps) * config.hidden_size, config, build),
        taps=taps,
    )


def tapped_layers(config: Fields) -> tuple[int, ...]:
    """Return the layers of the model whose inputs an EAGLE-3 head reads.

    `eagle_config.eagle_aux_hidden_state_layer_ids` lists layers by their outputs (as ModelOpt writes and SGLang reads
    it). If it is missing, the head reads the inputs of layers 2, n / 2 and n - 3, as in the authors' code.
    """
    count = config.integer("target_num_layers")
    listed: Any = config.child("eagle_config").values.get("eagle_aux_hidden_state_layer_ids")
    if not listed:
        return 2, count // 2, max(count - 3, 0)
    if not isinstance(listed, list) or not all(type(each) is int and 0 <= each < count for each in listed):
        raise CheckpointError(
            f"config.json: eagle_config.eagle_aux_hidden_state_layer_ids must list layers below {count}, not "
            f"{listed!r}."
        )
    return tuple(each + 1 for each in listed)
