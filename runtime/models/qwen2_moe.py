"""Qwen 2 with mixtures of experts: beside them one that computes every token, behind a gate."""

from __future__ import annotations

from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.mlp import GatedMLP
from runtime.layers.moe import MoE, Routing
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp
from runtime.models.mixtures import top_k
from runtime.models.qwen2 import window
from runtime.models.qwen3_moe import has_experts


def decoder(config: Config, build: Build) -> Decoder:
    """Windows as in Qwen 2."""
    bias = config.flag("qkv_bias", default=True)

    def layer(index: int) -> PreNormBlock:
        inner = experts if has_experts(config, index) else mlp
        attended = attention(config, index, build, bias=bias, window=window(config, index))
        return block(config, index, build, attended, inner(config, index, build))

    return assemble(config, build, layer)


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
