"""Qwen3-Next: gated delta nets in most layers, Qwen 3's attention with a gate in the other layers, Qwen 2's experts.

Qwen 3.5 stores the projections of delta nets in separate tensors. Its layers all have experts, or all have an MLP.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from runtime.errors import CheckpointError
from runtime.layers.build import Build
from runtime.layers.norm import RMSNorm
from runtime.layers.recurrent import GatedDeltaNet
from runtime.layers.weight import SubLayer, in_one_tensor
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.draft_head import DraftHead, Joined, JoinLinear
from runtime.modeling.layer import Layer, norms
from runtime.modeling.spellings import LINEAR
from runtime.models.qwen2 import experts, has_experts

Projections = Callable[[Config, str], list[SubLayer]]
Inner = Callable[[Layer], nn.Module]


def qwen3_next(config: Config, build: Build) -> Decoder:
    """Build Qwen3-Next. `layer_types` says which layers have delta nets."""
    return hybrid(config, build, by_key_head, sparse)


def sparse(at: Layer) -> nn.Module:
    """Return the experts of a layer or, if `has_experts` is false for it, its MLP."""
    return experts(at) if has_experts(at.config, at.index) else at.mlp()


def hybrid(config: Config, build: Build, projections: Projections, inner: Inner) -> Decoder:
    """Return a decoder with gated delta nets and attention, as `layer_types` says. `inner` builds MLPs or experts."""
    kinds, norm = config.layer_types() or [], norms(config, build, RMSNorm, unit_offset=True)

    def layer(at: Layer) -> nn.Module:
        if kinds[at.index] == LINEAR:
            mixer: nn.Module = delta_net(at, projections)
        else:  # the q projection also computes a gate for each head's output
            mixer = at.attention(qk_norm=at.head_norms(unit_offset=True), gated=True)
        return at.block(mixer, inner(at), norm=norm)

    return assemble(config, build, layer, norm=norm("model.norm"))


def delta_net(at: Layer, projections: Projections) -> nn.Module:
    """Return the gated delta net of a layer."""
    config, name = at.config, f"{at.name}.linear_attn"
    if config.activation != "silu":
        raise CheckpointError("config.json: hidden_act must be silu in a model with gated delta nets.")
    return GatedDeltaNet(
        name,
        at.index,
        config.hidden_size,
        config.integer("linear_num_key_heads"),
        config.integer("linear_num_value_heads"),
        config.integer("linear_key_head_dim"),
        config.integer("linear_value_head_dim"),
        config.integer("linear_conv_kernel_dim"),
        config.norm_eps,
        at.build,
        projections=projections(config, name),
    )


def by_key_head(config: Config, name: str) -> list[SubLayer]:
    """Return a delta net's projections as parts of two tensors. One holds q, k, v and z, the other b and a.

    Both tensors are ordered by key head.
    """
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
    """Build Qwen 3.5. `layer_types` says which layers have delta nets."""
    with_experts = config.optional_integer("num_experts") is not None
    return hybrid(config, build, by_part, experts if with_experts else Layer.mlp)


def by_part(config: Config, name: str) -> list[SubLayer]:
    """Return a delta net's projections: q, k and v are parts of one tensor; z, b and a have their own tensors."""
    key_heads, key = config.integer("linear_num_key_heads"), config.integer("linear_key_head_dim")
    ratio = config.integer("linear_num_value_heads") // key_heads
    value = ratio * config.integer("linear_value_head_dim")

    def part(tensor: str, piece: int) -> SubLayer:
        return SubLayer(f"{name}.{tensor}", key_heads * piece, "heads", piece)  # split over ranks at key heads

    mixed = in_one_tensor(f"{name}.in_proj_qkv", [part("", size) for size in (key, key, value)])
    return [*mixed, part("in_proj_z", value), part("in_proj_b", ratio), part("in_proj_a", ratio)]


def nextn(config: Config, build: Build) -> Decoder:
    """Return the multi-token prediction layer of Qwen3-Next: attention and experts."""
    at, norm = Layer(config, build, 0, "mtp.layers.0"), norms(config, build, RMSNorm, unit_offset=True)
    layer = at.block(at.attention(qk_norm=at.head_norms(unit_offset=True), gated=True), experts(at), norm=norm)
    token_norm, state_norm = norm("mtp.pre_fc_norm_embedding"), norm("mtp.pre_fc_norm_hidden")
    projection = JoinLinear("mtp.fc", 2 * config.hidden_size, config, build)
    first = Joined(projection, layer, build, token_norm=token_norm, state_norm=state_norm)
    return DraftHead([first], norm("mtp.norm"), config, build, normed_states=True)
