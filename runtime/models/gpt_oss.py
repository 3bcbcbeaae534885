"""gpt-oss: a learned sink for each head, windows in every other layer, experts with biases and a clamped gate."""

from __future__ import annotations

from ops.activation import SWIGLU_LIMIT
from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.moe import ExpertNames, MoE, Routing
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block
from runtime.models.mixtures import top_k

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
    """The first layer has a window, the second none, and so on."""
    if config.number("swiglu_limit") != SWIGLU_LIMIT:
        raise config.wrong("swiglu_limit", f"{SWIGLU_LIMIT:g}")
    kinds = config.layer_types() or ["sliding_attention", "full_attention"] * config.num_layers
    window, bias = config.optional_integer("sliding_window"), config.flag("attention_bias")
    num_experts = config.integer("num_local_experts")

    def layer(index: int) -> PreNormBlock:
        attended = attention(
            config,
            index,
            build,
            bias=bias,
            out_bias=bias,
            sinks=True,
            window=window if kinds[index] == "sliding_attention" else None,
        )
        experts = MoE(
            f"model.layers.{index}.mlp",
            config.hidden_size,
            config.intermediate_size,
            num_experts,
            "clamped_swiglu",
            build,
            routing=Routing(top_k(config, num_experts), renormalise=True, bias=True),
            names=NAMES,
        )
        return block(config, index, build, attended, experts)

    return assemble(config, build, layer)
