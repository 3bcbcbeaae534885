"""Qwen3-Next: gated delta nets in most layers, in the others Qwen 3's attention behind a gate; experts as in Qwen 2.

Qwen 3.5 has the projections of delta nets in tensors of their own, and experts or an MLP in all layers.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from runtime.errors import CheckpointError
from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.recurrent import GatedDeltaNet
from runtime.layers.weight import SubLayer, in_one_tensor
from runtime.models.config import LINEAR, Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp
from runtime.models.qwen2 import experts, has_experts
from runtime.models.qwen3 import head_norms

Projections = Callable[[Config, str], list[SubLayer]]
Inner = Callable[[Config, int, Build], nn.Module]


def qwen3_next(config: Config, build: Build) -> Decoder:
    """Layers as `layer_types` says."""
    return hybrid(config, build, by_key_head, sparse)


def sparse(config: Config, index: int, build: Build) -> nn.Module:
    """Experts, but where `mlp_only_layers` and `decoder_sparse_step` say otherwise."""
    return (experts if has_experts(config, index) else mlp)(config, index, build)


def hybrid(config: Config, build: Build, projections: Projections, inner: Inner) -> Decoder:
    """A decoder of both kinds of layers, with `inner` behind attention."""
    kinds = config.layer_types() or []

    def layer(index: int) -> PreNormBlock:
        mixer = (delta_net if kinds[index] == LINEAR else gated_attention)(config, index, build, projections)
        return block(config, index, build, mixer, inner(config, index, build), unit_offset=True)

    return assemble(config, build, layer, unit_offset=True)


def gated_attention(config: Config, index: int, build: Build, _: Projections) -> nn.Module:
    """Each head's output is let through by a gate, which the query's projection also gives."""
    bias = config.flag("attention_bias")
    norms = head_norms(config, index, build, unit_offset=True)
    return attention(config, index, build, bias=bias, out_bias=bias, qk_norm=norms, gated=True)


def delta_net(config: Config, index: int, build: Build, projections: Projections) -> nn.Module:
    """The layer that keeps a state."""
    name = f"model.layers.{index}.linear_attn"
    if config.activation != "silu":
        raise CheckpointError("config.json: hidden_act must be silu in a model with gated delta nets.")
    return GatedDeltaNet(
        name,
        index,
        config.hidden_size,
        config.integer("linear_num_key_heads"),
        config.integer("linear_num_value_heads"),
        config.integer("linear_key_head_dim"),
        config.integer("linear_value_head_dim"),
        config.integer("linear_conv_kernel_dim"),
        config.norm_eps,
        build,
        projections=projections(config, name),
    )


def by_key_head(config: Config, name: str) -> list[SubLayer]:
    """q, k, v and z in one tensor, b and a in another; both hold all of one key head, then all of the next."""
    heads, key = config.integer("linear_num_key_heads"), config.integer("linear_key_head_dim")
    ratio = config.integer("linear_num_value_heads") // heads
    value = ratio * config.integer("linear_value_head_dim")
    parts = []
    for tensor, pieces in (("in_proj_qkvz", (key, key, value, value)), ("in_proj_ba", (ratio, ratio))):
        row, stride = 0, sum(pieces)
        for piece in pieces:
            part = SubLayer(f"{name}.{tensor}", heads * piece, "heads", piece, row, heads * stride)
            parts.append(part._replace(piece=piece, stride=stride))
            row += piece
    return parts


def qwen3_5(config: Config, build: Build) -> Decoder:
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
