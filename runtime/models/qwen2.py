"""Qwen 2 and 2.5: Llama's layer with biases on q, k and v, and windows on the upper layers if asked for.

Beside its mixtures of experts is one that computes every token, behind a gate.
"""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.mlp import GatedMLP
from runtime.layers.moe import MoE, Routing
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp
from runtime.models.mixtures import top_k


def qwen2(config: Config, build: Build) -> Decoder:
    """Windows as `window` says."""

    def layer(index: int) -> PreNormBlock:
        attended = attention(config, index, build, bias=True, window=window(config, index))
        return block(config, index, build, attended, mlp(config, index, build))

    return assemble(config, build, layer)


def window(config: Config, index: int) -> int | None:
    """The layer's window: where `layer_types` says so, or else from layer `max_window_layers` on."""
    size = config.optional_integer("sliding_window", low=0)
    if not size or not config.flag("use_sliding_window"):
        return None
    kinds = config.layer_types()
    if kinds is not None:
        return size if kinds[index] == "sliding_attention" else None
    return size if index >= config.integer("max_window_layers", low=0) else None


def qwen2_moe(config: Config, build: Build) -> Decoder:
    """Windows as in `qwen2`."""
    bias = config.flag("qkv_bias", default=True)

    def layer(index: int) -> PreNormBlock:
        inner = experts if has_experts(config, index) else mlp
        attended = attention(config, index, build, bias=bias, window=window(config, index))
        return block(config, index, build, attended, inner(config, index, build))

    return assemble(config, build, layer)


def has_experts(config: Config, index: int) -> bool:
    """Every `decoder_sparse_step`-th layer has experts, unless `mlp_only_layers` lists it."""
    plain = config.values.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(type(each) is int for each in plain):
        raise config.wrong("mlp_only_layers", "a list of layer numbers")
    return index not in plain and (index + 1) % config.integer("decoder_sparse_step") == 0


def experts(config: Config, index: int, build: Build) -> MoE:
    """The mixture of layer `index`."""
    name, num_experts = f"model.layers.{index}.mlp", config.integer("num_experts")
    shared_size = config.integer("shared_expert_intermediate_size")
    return MoE(
        name,
        config.hidden_size,
        config.integer("moe_intermediate_size"),
        num_experts,
        config.activation,
        build,
        routing=Routing(top_k(config, num_experts), config.flag("norm_topk_prob")),
        shared=GatedMLP(f"{name}.shared_expert", config.hidden_size, shared_size, config.activation, build),
        shared_gate="shared_expert_gate",
    )
