"""The setup of a rank: models to load, and sizes to allocate. Rank 0 sends it to the other processes as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from runtime.config.fields import Fields
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ExpertPlan, GraphPlan, KernelPlan, LoraPlan, ModelPlan, Plan
from runtime.config.pooling import Pooling
from runtime.config.resolve.drafts import HEADS
from runtime.mesh.rank_info import RankInfo
from runtime.models.eagle import tapped_layers

TARGET = "target"  # name of the served model, as opposed to models that assist it
DRAFT = "draft"  # name of the model that proposes tokens


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """A model that a worker loads."""

    facts: ModelFacts
    plan: ModelPlan  # in a `WorkerSetup`, `plan.device` is the rank's device
    takes_media: bool = False  # whether media vectors may replace token embeddings
    # Whether the model is not sharded: ranks with `RankInfo.drafts` have all its layers, and other ranks have none.
    whole: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSetup:
    """How a rank sets up its draft model or head."""

    max_drafts: int = 0  # maximum number of draft tokens of a row
    topk: int = 1  # number of alternatives for each draft token
    step_prompt_tokens: int = 0  # maximum number of prompt tokens of a step
    token_map: str | None = None  # path of the list of tokens that a head proposes; None: all tokens
    of_target: bool = False  # whether the layers are in the served model's checkpoint (NEXTN)

    @classmethod
    def of(cls, plan: Plan) -> Self:
        """Return the setup for this plan."""
        schedule = plan.scheduler
        return cls(
            max_drafts=schedule.max_drafts,
            topk=schedule.draft_topk,
            step_prompt_tokens=schedule.step_prompt_tokens,
            token_map=plan.draft.token_map,
            of_target=plan.draft.algorithm == "NEXTN",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """The models and settings that a rank loads. Sent to other processes as JSON."""

    rank_info: RankInfo
    # By name; `TARGET` is the served model. Only ranks with `RankInfo.drafts` have the `whole` models.
    models: Mapping[str, ModelSetup]
    kernels: KernelPlan
    graphs: GraphPlan  # the steps that every rank captures as graphs
    lora: LoraPlan = field(default_factory=LoraPlan)
    experts: ExpertPlan = field(default_factory=ExpertPlan)
    # Initial expert of each slot, by layer number as text. In layers without an entry, experts are in order.
    expert_places: Mapping[str, Sequence[int]] = field(default_factory=dict)
    step_tokens: int = 0  # number of tokens that most steps do not exceed
    two_batches: float | None = None  # see `TwoBatchForward`; None: steps are not split
    head_layers: Sequence[int] | None = None  # see `StepExecutor`
    symmetric_memory: bool = False  # see `Mesh`
    max_drafts: int = 0  # maximum number of draft tokens of a sequence in a step, with alternatives
    max_step_drafts: int = 0  # maximum number of draft tokens of a step
    takes_branches: bool = False  # whether draft tokens may have alternatives
    drafter: DrafterSetup = field(default_factory=DrafterSetup)

    @property
    def device(self) -> str:
        """The rank's device, which all its models share."""
        return self.models[TARGET].plan.device

    @classmethod
    def of(
        cls,
        plan: Plan,
        models: Mapping[str, ModelSetup],
        rank: int,
        first_device: int,
        expert_places: Mapping[str, Sequence[int]] | None = None,
    ) -> Self:
        """Return the setup of one rank of a replica. `first_device` is the replica's first device on this machine."""
        parallel, schedule = plan.parallel, plan.scheduler
        device = plan.model.device
        if device != "cpu":
            index = first_device + rank % len(parallel.ranks_here)
            device = f"cuda:{int(device.partition(':')[2] or 0) + index * parallel.gpu_step}"
        info = rank_info(plan, rank)
        return cls(
            rank_info=info,
            models={
                name: replace(model, plan=replace(model.plan, device=device))
                for name, model in models.items()
                if info.drafts or not model.whole
            },
            kernels=plan.kernels,
            graphs=plan.graphs,
            lora=plan.lora,
            experts=plan.experts,
            expert_places=expert_places or {},
            step_tokens=schedule.step_prompt_tokens + schedule.max_sampled,
            two_batches=parallel.two_batches,
            head_layers=_head_layers(plan, models),
            symmetric_memory=parallel.symmetric_memory,
            max_drafts=plan.scheduler.max_row_drafts,
            max_step_drafts=plan.scheduler.max_step_drafts,
            takes_branches=plan.scheduler.takes_branches,
            drafter=DrafterSetup.of(plan),
        )

    @classmethod
    def decode(cls, body: Mapping[str, Any], path: str | None) -> Self:
        """Decode the setup from JSON. `path` is the path of the target's checkpoint on this machine, if it differs."""
        served = body["models"][TARGET]["plan"]["path"]

        def model(name: str, facts: dict[str, Any], plan: dict[str, Any], **flags: bool) -> ModelSetup:
            # The draft head of NEXTN has the target's path.
            here = {"path": path} if path is not None and plan["path"] == served else {}
            facts = {**facts, **here, "eos_ids": frozenset(facts["eos_ids"])}
            facts["pooling"] = Pooling.decode(facts.get("pooling"))
            return ModelSetup(ModelFacts(**facts), ModelPlan(**{**plan, **here}), **flags)

        return cls(
            rank_info=RankInfo(**body["rank_info"]),
            models={name: model(name, **parts) for name, parts in body["models"].items()},
            kernels=KernelPlan(**body["kernels"]),
            graphs=GraphPlan(**body["graphs"]),
            lora=LoraPlan(**{**body["lora"], "sources": ()}),
            experts=ExpertPlan(**body["experts"]),
            expert_places=body["expert_places"],
            step_tokens=body["step_tokens"],
            two_batches=body["two_batches"],
            head_layers=body["head_layers"],
            symmetric_memory=body["symmetric_memory"],
            max_drafts=body["max_drafts"],
            max_step_drafts=body["max_step_drafts"],
            takes_branches=body["takes_branches"],
            drafter=DrafterSetup(**body["drafter"]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSetup:
    """Sizes of the KV pools and of tables by sequence index. Sent to other processes as JSON.

    The pools of all models have the same number of pages, so all models can use the same page table.
    """

    num_pages: int
    page_size: int
    kv_dtype: str
    num_sequences: int
    # Name -> number of units, for all cache kinds other than pages.
    kinds: Mapping[str, int] = field(default_factory=dict)
    num_host_pages: int = 0  # number of pages in host memory
    num_tier_pages: int = 0  # number of the last host pages; on a CPU, their memory is allocated in the background
    host_blocks: bool = False  # whether each host page is one contiguous block over all layers
    direct_copies: bool = False  # whether a GPU copies pages with library calls instead of a kernel


def rank_info(plan: Plan, rank: int) -> RankInfo:
    """Return the coordinates of a rank of a replica."""
    parallel = plan.parallel
    return RankInfo(
        rank=rank,
        tp_size=parallel.attention_ranks,
        pp_size=parallel.pp_size,
        dp_size=parallel.num_groups,
        ep_size=plan.experts.ep_size,
        head_by_group=parallel.head_by_group,
        whole_dense=parallel.whole_dense,
    )


def _head_layers(plan: Plan, models: Mapping[str, ModelSetup]) -> Sequence[int] | None:
    """Return the layers whose inputs a draft head reads (see `StepExecutor`), or None if there is no draft head."""
    if plan.draft.algorithm not in HEADS:
        return None
    facts = models[DRAFT].facts
    return tapped_layers(Fields(facts.config, "config.json: ")) if plan.draft.algorithm == "EAGLE3" else ()
