"""Qwen 3 with mixtures of experts: Qwen 3's layer, most of them with experts in the place of the MLP."""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.moe import MoE, Routing
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import block, mlp
from runtime.models.mixtures import top_k
from runtime.models.qwen3 import normed_attention


def decoder(config: Config, build: Build) -> Decoder:
    """The window, if there is one, is that of all layers."""
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window") else None

    def layer(index: int) -> PreNormBlock:
        inner = experts if has_experts(config, index) else mlp
        attended = normed_attention(config, index, build, window)
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
    # Two spellings; the older one is that of the published checkpoints.
    num_experts = config.optional_integer("num_experts") or config.integer("num_local_experts")
    return MoE(
        f"model.layers.{index}.mlp",
        config.hidden_size,
        config.integer("moe_intermediate_size"),
        num_experts,
        config.activation,
        build,
        routing=Routing(top_k(config, num_experts), config.flag("norm_topk_prob")),
    )
