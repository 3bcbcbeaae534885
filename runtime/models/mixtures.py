"""What families with mixtures of experts have in common."""

from __future__ import annotations

from typing import Any

from torch import nn

from ops.moe import Grouping
from runtime.errors import CheckpointError
from runtime.layers.build import Build
from runtime.layers.mlp import GatedMLP
from runtime.layers.moe import ExpertNames, MoE, Routing
from runtime.models.config import Config


def top_k(config: Config, num_experts: int) -> int:
    """How many experts compute a token."""
    count = config.integer("num_experts_per_tok")
    if count > num_experts:
        raise CheckpointError(f"config.json: a token cannot have {count} of {num_experts} experts.")
    return count


def grouping(config: Config, num_experts: int, places: int) -> Grouping | None:
    """From which groups experts are chosen, a group being as good as its best `places` experts; None: from all."""
    groups, best = config.integer("n_group"), config.integer("topk_group")
    if num_experts % groups or best > groups:
        raise CheckpointError(f"config.json: {best} of {groups} groups of {num_experts} experts cannot be.")
    return Grouping(groups, best, places) if groups > 1 else None


def beside_shared(
    config: Config,
    index: int,
    build: Build,
    num_experts: int,
    num_shared: int,
    *,
    bias: bool = False,
    **options: Any,
) -> MoE:
    """The mixture of layer `index`, with `num_shared` experts that compute every token as one. `options` are MoE's."""
    name, inner_size = f"model.layers.{index}.mlp", config.integer("moe_intermediate_size")
    shared = None
    if num_shared:
        sizes = config.hidden_size, inner_size * num_shared
        shared = GatedMLP(f"{name}.shared_experts", *sizes, config.activation, build, bias=bias)
    return MoE(
        name, config.hidden_size, inner_size, num_experts, config.activation, build, shared=shared, **options
    )


def block_sparse(
    config: Config, index: int, build: Build, names: ExpertNames, *, shared: nn.Module | None = None
) -> MoE:
    """The mixture of layer `index` as in Mixtral: softmax over the chosen experts alone."""
    num_experts = config.integer("num_local_experts")
    return MoE(
        f"model.layers.{index}.block_sparse_moe",
        config.hidden_size,
        config.intermediate_size,
        num_experts,
        config.activation,
        build,
        routing=Routing(top_k(config, num_experts), renormalise=True),
        names=names,
        shared=shared,
    )
