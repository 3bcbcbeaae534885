"""Qwen 3: Llama's layer with q and k normalised per head, and Qwen 2's windows. The MoE models have experts."""

from __future__ import annotations

from torch import nn

from runtime.layers.build import Build
from runtime.layers.moe import MoE, Routing
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer
from runtime.modeling.mixtures import top_k
from runtime.models.qwen2 import has_experts, windows


def qwen3(config: Config, build: Build) -> Decoder:
    """Build Qwen 3. It has the windows of Qwen 2."""
    sizes = windows(config)

    def layer(at: Layer) -> nn.Module:
        return at.block(at.attention(qk_norm=at.head_norms(), window=sizes[at.index]), at.mlp())

    return assemble(config, build, layer)


def qwen3_moe(config: Config, build: Build) -> Decoder:
    """Build Qwen 3 MoE. If config.json has a window, all layers have it."""
    window = config.optional_integer("sliding_window") if config.flag("use_sliding_window") else None

    def layer(at: Layer) -> nn.Module:
        attended = at.attention(qk_norm=at.head_norms(), window=window)
        return at.block(attended, experts(at) if has_experts(config, at.index) else at.mlp())

    return assemble(config, build, layer)


def experts(at: Layer) -> MoE:
    """Return a layer's experts."""
    # The field has two names; published checkpoints use the older one, num_experts.
    num_experts = at.config.optional_integer("num_experts") or at.config.integer("num_local_experts")
    routing = Routing(top_k(at.config, num_experts), at.config.flag("norm_topk_prob"))
    return at.experts(at.config.integer("moe_intermediate_size"), num_experts, routing=routing)
