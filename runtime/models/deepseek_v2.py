"""DeepSeek V2: latent attention, experts by softmax, from the best groups where the model is large."""

from __future__ import annotations

from ops.moe import Grouping
from runtime.errors import CheckpointError
from runtime.layers.build import Build
from runtime.layers.mlp import GatedMLP
from runtime.layers.moe import MoE, Routing
from runtime.models.config import Config
from runtime.models.decoder import Decoder
from runtime.models.deepseek_v3 import latent
from runtime.models.qwen3_moe import top_k

METHODS = ("greedy", "group_limited_greedy")


def decoder(config: Config, build: Build) -> Decoder:
    """Some layers have an MLP, most of them experts."""
    return latent(config, build, experts)


def experts(config: Config, index: int, build: Build) -> MoE:
    """The mixture of layer `index`; a group is as good as its best expert (arXiv 2405.04434, section 2.2.2)."""
    name, num_experts = f"model.layers.{index}.mlp", config.integer("n_routed_experts")
    if config.flag("norm_topk_prob"):
        raise CheckpointError("config.json: norm_topk_prob of DeepSeek V2 is not supported.")
    grouping = None
    if config.choice("topk_method", [*METHODS], default="greedy") != "greedy":
        groups, best = config.integer("n_group"), config.integer("topk_group")
        if num_experts % groups or best > groups:
            raise CheckpointError(
                f"config.json: {best} of {groups} groups of {num_experts} experts cannot be."
            )
        grouping = Grouping(groups, best, 1)
    inner_size = config.integer("moe_intermediate_size")
    shared_size = inner_size * config.integer("n_shared_experts")
    return MoE(
        name,
        config.hidden_size,
        inner_size,
        num_experts,
        config.activation,
        build,
        routing=Routing(
            top_k(config, num_experts),
            renormalise=False,
            grouping=grouping,
            scale=config.number("routed_scaling_factor"),
            wide=True,
        ),
        shared=GatedMLP(f"{name}.shared_experts", config.hidden_size, shared_size, config.activation, build),
    )
