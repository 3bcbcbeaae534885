"""Granite with mixtures of experts: Granite's factors, and the weights of all experts in one tensor."""

from __future__ import annotations

from runtime.layers.build import Build
from runtime.layers.moe import ExpertNames, MoE, Routing
from runtime.models.config import Config
from runtime.models.decoder import Decoder
from runtime.models.granite import scaled
from runtime.models.qwen3_moe import top_k

NAMES = ExpertNames(
    router="router.layer", gate="input_linear.weight", up="input_linear.weight", down="output_linear.weight"
)


def decoder(config: Config, build: Build) -> Decoder:
    """Experts in every layer."""
    num_experts = config.integer("num_local_experts")
    routing = Routing(top_k(config, num_experts), renormalise=True)

    def experts(index: int) -> MoE:
        name, sizes = f"model.layers.{index}.block_sparse_moe", (config.hidden_size, config.intermediate_size)
        return MoE(name, *sizes, num_experts, config.activation, build, routing=routing, names=NAMES)

    return scaled(config, build, experts)
