"""Qwen 3.5: Qwen3-Next's layers, their projections in tensors of their own, with experts or an MLP in all of them."""

from __future__ import annotations

from runtime.layers.build import Build
from runtime.layers.weight import SubLayer, in_one_tensor
from runtime.models.config import Config
from runtime.models.decoder import Decoder
from runtime.models.llama import mlp
from runtime.models.qwen2_moe import experts
from runtime.models.qwen3_next import hybrid


def decoder(config: Config, build: Build) -> Decoder:
    """Layers as `layer_types` says."""
    with_experts = config.optional_integer("num_experts") is not None
    return hybrid(config, build, by_part, experts if with_experts else mlp)


def by_part(config: Config, name: str) -> list[SubLayer]:
    """q, k and v one after the other in one tensor, z, b and a each in its own."""
    keys = config.integer("linear_num_key_heads") * config.integer("linear_key_head_dim")
    heads = config.integer("linear_num_value_heads")
    values = heads * config.integer("linear_value_head_dim")
    mixed = [SubLayer("", size) for size in (keys, keys, values)]
    others = [
        SubLayer(f"{name}.in_proj_{part}", size) for part, size in (("z", values), ("b", heads), ("a", heads))
    ]
    return [*in_one_tensor(f"{name}.in_proj_qkv", mixed), *others]
