"""Code that families with experts share."""

from __future__ import annotations

from typing import Any

from torch import nn

from ops.moe import Grouping
from runtime.errors import CheckpointError
from runtime.layers.moe import ExpertNames, MoE, Routing
from runtime.modeling.config import Config
from runtime.modeling.layer import Layer

GROUP_PLACES = 2  # groups of experts are ranked by the sum of this many best scores


def top_k(config: Config, num_experts: int) -> int:
    """Return the number of experts per token. Raises CheckpointError if the model has fewer experts."""
    count = config.integer("num_experts_per_tok")
    if count > num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok {count} exceeds the {num_experts} experts of the model."
        )
    return count


def grouping(config: Config, num_experts: int, best_of_group: int) -> Grouping | None:
    """Return the settings of group-limited routing, or None if there is only one group.

    Groups are ranked by the sum of their `best_of_group` top scores.
    """
    groups, best = config.integer("n_group"), config.integer("topk_group")
    if num_experts % groups or best > groups:
        raise CheckpointError(
            f"config.json: topk_group {best} and n_group {groups} do not fit {num_experts} experts: n_group must "
            "divide the number of experts, and topk_group must not exceed n_group."
        )
    return Grouping(groups, best, best_of_group) if groups > 1 else None


def sigmoid_routing(config: Config, num_experts: int) -> Routing:
    """Return DeepSeek V3's routing (arXiv 2412.19437, section 2.1.2): sigmoid scores, limited to the best groups."""
    return Routing(
        top_k(config, num_experts),
        config.flag("norm_topk_prob", default=True),
        scoring="sigmoid",
        grouping=grouping(config, num_experts, GROUP_PLACES),
        scale=config.number("routed_scaling_factor"),
        wide=True,
    )


def with_shared_experts(at: Layer, num_experts: int, num_shared: int, *, bias: bool = False, **options: Any) -> MoE:
    """Return an MoE layer in which one MLP computes all `num_shared` shared experts.

    `options` are further arguments of `MoE`.
    """
    size = at.config.integer("moe_intermediate_size")
    shared = at.mlp(size * num_shared, name="mlp.shared_experts", bias=bias) if num_shared else None
    return at.experts(size, num_experts, shared=shared, **options)


def block_sparse(at: Layer, names: ExpertNames, *, shared: nn.Module | None = None) -> MoE:
    """Return an MoE layer as in Mixtral, with a softmax over the chosen experts only."""
    num_experts = at.config.integer("num_local_experts")
    routing = Routing(top_k(at.config, num_experts), renormalise=True)
    size, name = at.config.intermediate_size, "block_sparse_moe"
    return at.experts(size, num_experts, name=name, routing=routing, names=names, shared=shared)
