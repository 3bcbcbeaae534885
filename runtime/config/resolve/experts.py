"""The experts' section of the plan: their placement on ranks, load balancing, and records of their use."""

from __future__ import annotations

from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ExpertPlan, ModelPlan, stage_nodes
from runtime.config.resolve.plan_builder import Decision, PlanBuilder

PLACING = ("ep_num_redundant_experts", "ep_dispatch_algorithm", "init_expert_location", "enable_eplb")
BALANCING = (
    "eplb_algorithm",
    "eplb_rebalance_num_iterations",
    "eplb_rebalance_layers_per_chunk",
    "eplb_min_rebalancing_utilization_threshold",
)


def expert_plan(builder: PlanBuilder, facts: ModelFacts, model: ModelPlan) -> ExpertPlan:
    """Plan the experts. Refuse an --ep-size that does not divide the ranks or experts, and options without effect."""
    args = builder.args.moe
    ep_size = _ep_size(builder)
    record = _record(builder)
    returned = builder.args.sampling.enable_return_routed_experts
    _check_model(builder, facts, model, record.value is not None or returned)
    if facts.path and facts.num_experts and (facts.num_experts + args.ep_num_redundant_experts) % ep_size.value:
        missing = -(facts.num_experts + args.ep_num_redundant_experts) % ep_size.value
        builder.refuse(
            "ep_size",
            f"--ep-size {ep_size.value} does not divide the model's {facts.num_experts} experts; set "
            f"--ep-num-redundant-experts {args.ep_num_redundant_experts + missing}.",
        )
    if ep_size.value == 1:
        for option in PLACING:
            if builder.args.changed(option) and not (option == "ep_dispatch_algorithm" and _is_fake(builder)):
                builder.refuse(option, f"{_flag(option)} needs experts on several ranks; set --ep-size too.")
    if args.moe_a2a_backend == "all_to_all" and (ep_size.value == 1 or ep_size.value != builder.args.parallel.tp_size):
        builder.refuse("moe_a2a_backend", "--moe-a2a-backend all_to_all needs an --ep-size equal to --tp-size.")
    if not args.enable_eplb:
        for option in BALANCING:
            if builder.args.changed(option) and option != "eplb_rebalance_num_iterations":
                builder.refuse(option, f"{_flag(option)} needs --enable-eplb.")
    if record.value == "per_token" and builder.args.parallel.enable_dp_attention:
        builder.refuse(
            "expert_distribution_recorder_mode",
            "--expert-distribution-recorder-mode per_token: with --enable-dp-attention, rank 0 knows only the tokens "
            "of its own attention group; use stat or per_pass.",
        )
    nodes = stage_nodes(builder.args.parallel.nnodes, builder.args.parallel.pp_size)
    if args.eplb_algorithm.endswith("_hierarchical") and (facts.num_expert_groups % nodes or ep_size.value % nodes):
        builder.refuse(
            "eplb_algorithm",
            f"--eplb-algorithm {args.eplb_algorithm}: the {nodes} machines of a pipeline stage must divide the "
            f"{facts.num_expert_groups} groups of experts and --ep-size {ep_size.value}; use auto.",
        )
    if builder.args.graphs.enable_torch_compile and (record.value is not None or returned or _is_fake(builder)):
        builder.refuse(
            "enable_torch_compile",
            "--enable-torch-compile: the choices of experts are not recorded or replaced in compiled code; leave it "
            "out, or the options of the recorder and --enable-return-routed-experts.",
        )
    _check_returned(builder)
    steps = args.expert_distribution_recorder_buffer_size
    if steps == 0:
        builder.refuse(
            "expert_distribution_recorder_buffer_size",
            "--expert-distribution-recorder-buffer-size 0 records nothing; set -1 for all steps.",
        )
    return builder.build(
        ExpertPlan,
        ep_size=ep_size,
        dispatch=builder.follow_or("ep_dispatch_algorithm", "static", "the default"),
        record=record,
        record_steps=builder.follow_or(
            "expert_distribution_recorder_buffer_size",
            args.eplb_rebalance_num_iterations,
            "the value of --eplb-rebalance-num-iterations",
        ),
    )


def _ep_size(builder: PlanBuilder) -> Decision[int]:
    args, tp_size = builder.args.moe, builder.args.parallel.tp_size
    if args.enable_ep_moe:
        if builder.args.changed("ep_size") and args.ep_size != tp_size:
            builder.refuse("enable_ep_moe", f"--enable-ep-moe means --ep-size {tp_size}; give one of them.")
        return Decision(tp_size, "--enable-ep-moe: the value of --tp-size")
    if tp_size % args.ep_size:
        builder.refuse("ep_size", f"--ep-size {args.ep_size} must divide --tp-size {tp_size}; change one of them.")
        return Decision(1, "the requested value cannot be used")
    return builder.follow("ep_size")


def _record(builder: PlanBuilder) -> Decision[str | None]:
    args = builder.args.moe
    if args.expert_distribution_recorder_mode is not None:
        return Decision(args.expert_distribution_recorder_mode, "as asked")
    for option in ("enable_eplb", "enable_expert_distribution_metrics"):
        if builder.args.get(option):
            return Decision("stat", f"{_flag(option)} counts the tokens of each expert")
    return Decision(None, "the default")


def _check_model(builder: PlanBuilder, facts: ModelFacts, model: ModelPlan, records: bool) -> None:
    asked = [option for option in ("ep_size", "enable_ep_moe") if builder.args.changed(option)]
    recording = (
        "expert_distribution_recorder_mode",
        "enable_expert_distribution_metrics",
        "enable_eplb",
        "enable_return_routed_experts",
    )
    asked += [option for option in recording if records and builder.args.changed(option)]
    for option in asked if facts.path else ():
        if model.by_transformers:
            why = "transformers' modules compute this model, without its experts; leave it out"
            builder.refuse(option, f"{_flag(option)}: {why}.")
        elif not facts.num_experts:
            builder.refuse(option, f"{_flag(option)}: this model has no experts; leave it out.")


def _check_returned(builder: PlanBuilder) -> None:
    option, parallel, why = "enable_return_routed_experts", builder.args.parallel, None
    if parallel.pp_size > 1:
        why = "each stage of a pipeline knows only the experts of its layers; use --pp-size 1"
    elif parallel.enable_dp_attention:
        why = "rank 0 has only the tokens of its own attention group; leave --enable-dp-attention out"
    if builder.args.get(option) and why is not None:
        builder.refuse(option, f"{_flag(option)}: {why}.")


def _is_fake(builder: PlanBuilder) -> bool:
    return builder.args.moe.ep_dispatch_algorithm == "fake"


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
