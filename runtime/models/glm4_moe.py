"""GLM-4.5 to 4.7 with mixtures of experts: scores by sigmoid, experts from the best groups, one for every token."""

from __future__ import annotations

from typing import Any

from torch import nn

from ops.moe import Grouping
from runtime.errors import CheckpointError
from runtime.layers.block import PreNormBlock
from runtime.layers.build import Build
from runtime.layers.mlp import GatedMLP
from runtime.layers.moe import ExpertNames, MoE, Routing
from runtime.models.config import Config
from runtime.models.decoder import Decoder, assemble
from runtime.models.llama import attention, block, mlp
from runtime.models.qwen3 import head_norms
from runtime.models.qwen3_moe import top_k

NAMES = ExpertNames(correction="gate.e_score_correction_bias")
GROUP_PLACES = 2  # a group is as good as its two best experts together


def decoder(config: Config, build: Build) -> Decoder:
    """The first `first_k_dense_replace` layers have an MLP."""
    plain, bias = config.integer("first_k_dense_replace", low=0), config.flag("attention_bias")

    def layer(index: int) -> PreNormBlock:
        options: dict[str, Any] = {"bias": bias}
        if config.flag("use_qk_norm"):
            options["qk_norm"] = head_norms(config, index, build)
        inner: nn.Module = (experts if index >= plain else mlp)(config, index, build)
        return block(config, index, build, attention(config, index, build, **options), inner)

    return assemble(config, build, layer)


def experts(config: Config, index: int, build: Build) -> MoE:
    """The mixture of layer `index` (arXiv 2412.19437, section 2.1.2)."""
    name, num_experts = f"model.layers.{index}.mlp", config.integer("n_routed_experts")
    groups, best = config.integer("n_group"), config.integer("topk_group")
    if num_experts % groups or best > groups:
        raise CheckpointError(f"config.json: {best} of {groups} groups of {num_experts} experts cannot be.")
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
            config.flag("norm_topk_prob", default=True),
            scoring="sigmoid",
            grouping=Grouping(groups, best, GROUP_PLACES) if groups > 1 else None,
            scale=config.number("routed_scaling_factor"),
            wide=True,
        ),
        names=NAMES,
        shared=GatedMLP(f"{name}.shared_experts", config.hidden_size, shared_size, config.activation, build),
    )
