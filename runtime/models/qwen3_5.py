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
    key_heads, key = config.integer("linear_num_key_heads"), config.integer("linear_key_head_dim")
    ratio = config.integer("linear_num_value_heads") // key_heads
    value = ratio * config.integer("linear_value_head_dim")

    def part(own: str, piece: int) -> SubLayer:
        return SubLayer(f"{name}.{own}", key_heads * piece, "heads", piece)  # cut between key heads

    mixed = in_one_tensor(f"{name}.in_proj_qkv", [part("", size) for size in (key, key, value)])
    return [*mixed, part("in_proj_z", value), part("in_proj_b", ratio), part("in_proj_a", ratio)]
