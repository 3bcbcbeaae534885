"""Qwen 1, 2 and 2.5: Llama's layer with biases on q, k and v, and optional windows in the upper layers.

MoE layers have a shared expert, whose output is multiplied by a gate.
"""

from __future__ import annotations

from torch import nn

from runtime.layers.build import Build
from runtime.layers.moe import MoE, Routing
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.draft_head import DraftHead, Joined, JoinLinear
from runtime.modeling.layer import Layer
from runtime.modeling.mixtures import top_k


def qwen2(config: Config, build: Build) -> Decoder:
    """Build Qwen 2 or 2.5."""
    sizes = windows(config)

    def layer(at: Layer) -> nn.Module:
        return at.block(at.attention(bias=True, out_bias=False, window=sizes[at.index]), at.mlp())

    return assemble(config, build, layer)


def qwen1(config: Config, build: Build) -> Decoder:
    """Build Qwen 1: multi-head attention, with q, k and v in one tensor."""
    out_bias = not config.flag("no_bias")

    def layer(at: Layer) -> nn.Module:
        return at.block(at.attention(bias=True, out_bias=out_bias, fused="c_attn"), at.mlp(bias=out_bias))

    return assemble(config, build, layer)


def mimo_nextn(config: Config, build: Build) -> Decoder:
    """Return the draft head of MiMo's first multi-token prediction layer (arXiv 2505.07608, section 2.2)."""
    at = Layer(config, build, 0, "mtp")
    layer = at.block(at.attention(bias=True, out_bias=False), at.mlp())
    token_norm, state_norm = at.norm("token_layernorm"), at.norm("hidden_layernorm")
    projection = JoinLinear("mtp.input_proj", 2 * config.hidden_size, config, build)
    first = Joined(projection, layer, build, token_norm=token_norm, state_norm=state_norm, state_first=True)
    return DraftHead([first], at.norm("final_layernorm"), config, build, normed_states=True)


def windows(config: Config) -> list[int | None]:
    """Return the window of each layer; None: full attention.

    If `layer_types` is missing, layers from `max_window_layers` on have a window.
    """
    if not config.optional_integer("sliding_window", low=0) or not config.flag("use_sliding_window"):
        return [None] * config.num_layers
    first = 0 if config.layer_types() else config.integer("max_window_layers", low=0)
    kinds = ["full_attention" if index < first else "sliding_attention" for index in range(config.num_layers)]
    return config.windows(kinds)


def qwen2_moe(config: Config, build: Build) -> Decoder:
    """Build Qwen 2 MoE. It has the windows of Qwen 2."""
    bias, sizes = config.flag("qkv_bias", default=True), windows(config)

    def layer(at: Layer) -> nn.Module:
        attended = at.attention(bias=bias, out_bias=False, window=sizes[at.index])
        return at.block(attended, experts(at) if has_experts(config, at.index) else at.mlp())

    return assemble(config, build, layer)


def has_experts(config: Config, index: int) -> bool:
    """Whether layer `index` has experts: every `decoder_sparse_step`-th layer that is not in `mlp_only_layers`."""
    dense = config.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(each) is int for each in dense):
        raise config.wrong("mlp_only_layers", "a list of layer numbers")
    return index not in dense and (index + 1) % config.integer("decoder_sparse_step") == 0


def experts(at: Layer) -> MoE:
    """Return a layer's experts and its shared expert."""
    num_experts = at.config.integer("num_experts")
    return at.experts(
        at.config.integer("moe_intermediate_size"),
        num_experts,
        routing=Routing(top_k(at.config, num_experts), at.config.flag("norm_topk_prob")),
        shared=at.mlp(at.config.integer("shared_expert_intermediate_size"), name="mlp.shared_expert"),
        shared_gate="shared_expert_gate",
    )
