"""DeepSeek V2: latent attention, experts by softmax, from the best groups where the model is large."""

from __future__ import annotations

from runtime.errors import CheckpointError
from runtime.layers.build import Build
from runtime.layers.moe import MoE, Routing
from runtime.models.config import Config
from runtime.models.decoder import Decoder
from runtime.models.deepseek_v3 import latent
from runtime.models.mixtures import beside_shared, grouping, top_k

METHODS = ("greedy", "group_limited_greedy")


def decoder(config: Config, build: Build) -> Decoder:
    """Some layers have an MLP, most of them experts."""
    return latent(config, build, experts)


def experts(config: Config, index: int, build: Build) -> MoE:
    """The mixture of layer `index`; a group is as good as its best expert (arXiv 2405.04434, section 2.2.2)."""
    num_experts = config.integer("n_routed_experts")
    if config.flag("norm_topk_prob"):
        raise CheckpointError("config.json: norm_topk_prob of DeepSeek V2 is not supported.")
    limited = config.choice("topk_method", [*METHODS], default="greedy") != "greedy"
    routing = Routing(
        top_k(config, num_experts),
        renormalise=False,
        grouping=grouping(config, num_experts, 1) if limited else None,
        scale=config.number("routed_scaling_factor"),
        wide=True,
    )
    return beside_shared(
        config, index, build, num_experts, config.integer("n_shared_experts"), routing=routing
    )
