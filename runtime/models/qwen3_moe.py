"""Qwen 3 with mixtures of experts: Qwen 3's layer, most of them with experts in the place of the MLP."""

from __future__ import annotations

from runtime.errors import CheckpointError
from runtime.layers.block import PreNormBlock
from runtime.layers.moe import MoE
from runtime.models.config import Config
from runtime.models.decoder import Build
from runtime.models.llama import block


def layer(config: Config, index: int, build: Build) -> PreNormBlock:
    """Layer `index`; the window, if there is one, is that of all layers."""
    bias = config.flag("attention_bias")
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window") else None
    mlp = _experts(config, index, build) if has_experts(config, index) else None
    return block(config, index, build, qkv_bias=bias, out_bias=bias, qk_norm=True, window=window, mlp=mlp)


def has_experts(config: Config, index: int) -> bool:
    """Every `decoder_sparse_step`-th layer has experts, unless `mlp_only_layers` lists it."""
    plain = config.values.get("mlp_only_layers") or []
    if not isinstance(plain, list) or not all(type(each) is int for each in plain):
        raise config.wrong("mlp_only_layers", "a list of layer numbers")
    return index not in plain and (index + 1) % config.integer("decoder_sparse_step") == 0


def _experts(config: Config, index: int, build: Build) -> MoE:
    # Two spellings; the older one is that of the published checkpoints.
    num_experts = config.optional_integer("num_experts") or config.integer("num_local_experts")
    top_k = config.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise CheckpointError(f"config.json: a token cannot have {top_k} of {num_experts} experts.")
    return MoE(
        f"model.layers.{index}.mlp",
        config.hidden_size,
        config.integer("moe_intermediate_size"),
        num_experts,
        top_k,
        config.activation,
        build.kernels,
        renormalise=config.flag("norm_topk_prob"),
    )
