"""gpt-oss: a learned attention sink per head, a window in every other layer, experts with biases and a clamped gate."""

from __future__ import annotations

from torch import nn

from ops.activation import SWIGLU_LIMIT
from runtime.layers.build import Build
from runtime.layers.moe import ExpertNames, Routing
from runtime.modeling.config import Config
from runtime.modeling.decoder import Decoder, assemble
from runtime.modeling.layer import Layer
from runtime.modeling.mixtures import top_k

NAMES = ExpertNames(
    router="router",
    gate="experts.gate_up_proj",
    up="experts.gate_up_proj",
    down="experts.down_proj",
    bias="_bias",
    interleaved=True,
    transposed=True,
)


def decoder(config: Config, build: Build) -> Decoder:
    """Build gpt-oss. Every other layer has a window, starting with the first layer."""
    if config.number("swiglu_limit") != SWIGLU_LIMIT:
        raise config.wrong("swiglu_limit", f"{SWIGLU_LIMIT:g}")
    windows = config.windows(["sliding_attention", "full_attention"] * config.num_layers)
    num_experts = config.integer("num_local_experts")
    routing = Routing(top_k(config, num_experts), renormalise=True, bias=True)

    def layer(at: Layer) -> nn.Module:
        attended = at.attention(sinks=True, window=windows[at.index])
        size, activation = config.intermediate_size, "clamped_swiglu"
        return at.block(attended, at.experts(size, num_experts, activation=activation, routing=routing, names=NAMES))

    return assemble(config, build, layer)
