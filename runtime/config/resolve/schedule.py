"""The scheduler section of the plan."""

from __future__ import annotations

from collections.abc import Mapping

from ops.machine import GIB, Gpu
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import CachePlan, KernelPlan, SchedulerPlan
from runtime.config.resolve.drafts import draft_decisions
from runtime.config.resolve.plan_builder import Decision, PlanBuilder

OPEN_ENDED_TOKENS = 256  # estimated output of a request without `max_tokens`: a typical chat answer
# Maximum number of forced tokens that are searched for at once. Other rows wait for their masks during the search.
MAX_FORCED = 32
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0  # limits of an API key's weight
QUEUE_FACTOR = 2  # maximum number of waiting sequences per running sequence
QUEUED_TOKENS = 2**23
MIN_QUEUE = 2048  # minimum queue length, for benchmarks that send all requests at once
ENCODER_TOKENS = 2048  # tokens per step of an encoder on a CPU, so that activations stay in the CPU cache
LAST_CHUNK = 512  # tokens of the last chunk of a prompt on a prefill server; earlier pages are sent meanwhile
DECAY_STEPS = 600  # number of steps over which the reserved share of output falls to its minimum


def schedule_plan(
    builder: PlanBuilder, gpu: Gpu | None, cache: CachePlan, facts: ModelFacts, kernels: KernelPlan
) -> SchedulerPlan:
    """Plan the scheduler. `gpu` is None on a CPU."""
    conservativeness = builder.args.schedule.schedule_conservativeness
    # Initial and minimum share of the remaining output for which admission reserves pages.
    ratio = min(0.7 * conservativeness, 1.0)
    ratio_min = 0.14 * ratio
    running, overlap = _max_running(builder, gpu), _overlap(builder)
    return builder.build(
        SchedulerPlan,
        max_running=running,
        max_queued=_max_queued(builder, running.value),
        max_queued_tokens=builder.follow_or("max_queued_tokens", QUEUED_TOKENS, "a few hundred megabytes of prompts"),
        chunk_tokens=_chunk_tokens(builder, gpu, cache.page_size, facts),
        max_prefill_tokens=_max_prefill_tokens(builder, gpu, facts),
        last_chunk_tokens=_last_chunk(builder, gpu, cache.page_size),
        policy=_policy(builder, cache),
        target_token_ms=_target(builder, facts),
        record_file=_record(builder, cache),
        overlap=overlap,
        new_token_ratio=Decision(ratio, f"0.7 x --schedule-conservativeness {conservativeness:g}, at most 1"),
        min_new_token_ratio=Decision(ratio_min, "0.14 x the initial value"),
        new_token_ratio_decay=Decision(
            (ratio - ratio_min) / DECAY_STEPS, f"from the initial to the minimum value in {DECAY_STEPS} steps"
        ),
        open_ended_tokens=Decision(
            int(OPEN_ENDED_TOKENS * conservativeness),
            f"{OPEN_ENDED_TOKENS} x --schedule-conservativeness {conservativeness:g}, until real outputs are known",
        ),
        reserved_tokens=_reserved(builder),
        owner_weights=_owner_weights(builder),
        micro_batches=Decision(builder.args.parallel.pp_size, "one per pipeline stage"),
        priorities=_priorities(builder),
        tiers=_tiers(builder),
        max_new_sequences=_max_new(builder),
        max_forced=builder.follow("disable_jump_forward", 0 if builder.args.text.disable_jump_forward else MAX_FORCED),
        forced_share=_forced_share(builder, gpu),
        **draft_decisions(builder, gpu, facts, kernels, overlap=overlap.value),
        adapter_slots=Decision(builder.args.lora.max_loras_per_batch, "the slots of --max-loras-per-batch"),
        adapters_fifo=Decision(builder.args.lora.lora_eviction_policy == "fifo", "by --lora-eviction-policy"),
    )


def _reserved(builder: PlanBuilder) -> Decision[int]:
    args = builder.args.disaggregation
    if args.disaggregation_mode == "decode" or args.disaggregation_prefill_replicas:
        return builder.follow("num_reserved_decode_tokens")
    if builder.args.changed("num_reserved_decode_tokens"):
        builder.refuse("num_reserved_decode_tokens", "--num-reserved-decode-tokens needs --disaggregation-mode decode.")
    return Decision(0, "prompts and outputs share the pages; --schedule-conservativeness applies")


def _target(builder: PlanBuilder, facts: ModelFacts) -> Decision[float | None]:
    schedule, flag = builder.args.schedule, "--target-inter-token-latency"
    if schedule.target_inter_token_latency is not None:
        reason = None
        if facts.needs_whole_prompts or (schedule.chunked_prefill_size or 0) < 0:
            reason = "prompts are not cut; leave --chunked-prefill-size out"
        elif not schedule.enable_mixed_chunk:
            reason = "prompts have steps of their own without --enable-mixed-chunk"
        if reason is not None:
            builder.refuse("target_inter_token_latency", f"{flag}: {reason}.")
    return builder.follow("target_inter_token_latency")


def _record(builder: PlanBuilder, cache: CachePlan) -> Decision[str | None]:
    if builder.args.debug.record is not None and cache.host_layout != "layer_first":
        builder.refuse(
            "record",
            "--record: when pages arrive from storage is not recorded; leave storage, --hicache-mem-layout and "
            "--disaggregation-mode out.",
        )
    return builder.follow("record")


def _forced_share(builder: PlanBuilder, gpu: Gpu | None) -> Decision[float]:
    if gpu is not None:
        return Decision(1.0, "a step with forced tokens cannot replay a CUDA graph, so it must save a whole step")
    if not builder.args.schedule.enable_mixed_chunk:
        return Decision(1.0, "a row with forced tokens needs a separate step")
    return Decision(0.0, "a row with several tokens takes little longer than a row with one token")


def _overlap(builder: PlanBuilder) -> Decision[bool]:
    if builder.args.parallel.pp_size > 1:
        return Decision(False, "pipeline stages overlap with each other instead")
    return builder.follow("disable_overlap_schedule", not builder.args.schedule.disable_overlap_schedule)


def _priorities(builder: PlanBuilder) -> Decision[bool]:
    asked = builder.args.schedule.enable_priority_scheduling
    if not asked and builder.args.schedule.schedule_low_priority_values_first:
        builder.refuse(
            "schedule_low_priority_values_first",
            "--schedule-low-priority-values-first needs --enable-priority-scheduling.",
        )
    return builder.follow("enable_priority_scheduling")


def _tiers(builder: PlanBuilder) -> Decision[Mapping[str, int]]:
    tiers, name, flag = builder.args.schedule.service_tier_priorities, "service_tier_priorities", "--service-tier-"
    if tiers and not builder.args.schedule.enable_priority_scheduling:
        builder.refuse(name, f"{flag}priorities needs --enable-priority-scheduling.")
    for tier, priority in tiers.items():
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) >= 2**31:
            builder.refuse(name, f"{flag}priorities: the priority of {tier!r} must be a whole number.")
    return builder.follow(name)


def _owner_weights(builder: PlanBuilder) -> Decision[Mapping[str, float]]:
    weights, name, flag = builder.args.schedule.api_key_weights, "api_key_weights", "--api-key-weights"
    if weights and builder.args.http.api_key_file is None:
        builder.refuse(name, f"{flag} needs --api-key-file, whose names it uses.")
    for key, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
            builder.refuse(name, f"{flag}: the weight of {key!r} must be between {MIN_WEIGHT:g} and {MAX_WEIGHT:g}.")
    return builder.follow(name)


def _max_new(builder: PlanBuilder) -> Decision[int | None]:
    asked = builder.follow("prefill_only_one_req")
    return asked._replace(value=1 if asked.value else None)


def _max_running(builder: PlanBuilder, gpu: Gpu | None) -> Decision[int]:
    size, device = (256, "CPU") if gpu is None else (2048, "GPU")
    reason = f"enough for a {device}; the KV cache may allow fewer"
    return builder.follow_or("max_running_requests", size, reason)


def _max_queued(builder: PlanBuilder, running: int) -> Decision[int]:
    reason = f"{QUEUE_FACTOR} x the maximum of running sequences, at least {MIN_QUEUE}"
    return builder.follow_or("max_queued_requests", max(QUEUE_FACTOR * running, MIN_QUEUE), reason)


def _chunk_tokens(builder: PlanBuilder, gpu: Gpu | None, page_size: int, facts: ModelFacts) -> Decision[int | None]:
    asked = builder.args.schedule.chunked_prefill_size
    if facts.needs_whole_prompts:
        if asked is not None and asked > 0:
            builder.refuse(
                "chunked_prefill_size",
                f"--chunked-prefill-size {asked}: {facts.architecture} needs each text in one step; leave it out, and "
                "limit steps with --max-prefill-tokens.",
            )
        return Decision(None, "embeddings of this model need the whole text in one step")
    if asked is not None and asked <= 0:
        return Decision(None, "as asked: no chunks")
    if asked is not None:
        whole = -(-asked // page_size) * page_size
        if whole != asked:
            return Decision(whole, f"{asked} rounded up to whole pages of {page_size}")
        return Decision(asked, "as asked")
    if gpu is None:
        size, reason = 4096, "the default without a GPU"
    else:
        gibibytes = gpu.memory_bytes / GIB
        size = 2048 if gibibytes < 35 else 8192 if gibibytes < 160 else 16384
        reason = f"for a GPU with {gibibytes:.0f} GiB of memory"
    whole = max(page_size, size // page_size * page_size)
    return Decision(whole, reason if whole == size else f"{reason}, in whole pages")


def _last_chunk(builder: PlanBuilder, gpu: Gpu | None, page_size: int) -> Decision[int | None]:
    args = builder.args.disaggregation
    if gpu is None and (args.disaggregation_mode == "prefill" or args.disaggregation_prefill_replicas):
        size = max(page_size, LAST_CHUNK // page_size * page_size)
        return Decision(size, "earlier pages are sent while the last chunk is computed")
    return Decision(None, "only for prefill servers and replicas on a CPU")


def _max_prefill_tokens(builder: PlanBuilder, gpu: Gpu | None, facts: ModelFacts) -> Decision[int]:
    asked = "max_prefill_tokens" in builder.args.explicitly_set
    if gpu is not None or not facts.is_encoder or asked:
        return builder.follow("max_prefill_tokens")
    size = max(ENCODER_TOKENS, facts.context_length)
    return Decision(size, "activations stay in the CPU cache, and the longest text fits")


def _policy(builder: PlanBuilder, cache: CachePlan) -> Decision[str]:
    by_prefix = builder.args.schedule.schedule_policy in ("lpm", "dfs-weight")
    if by_prefix and not cache.prefix_cache:
        return Decision("fcfs", "prefix caching is off, so prompts have no cached prefixes")
    return builder.follow("schedule_policy")
