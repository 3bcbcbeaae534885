"""The scheduler's section of the plan."""

from __future__ import annotations

from ops.machine import GIB, Gpu
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import CachePlan, SchedulerPlan
from runtime.config.resolve.plan_builder import Decision, PlanBuilder, build

OPEN_ENDED_TOKENS = 256  # a usual answer of a chat
MAX_FORCED = 32  # tokens that are found at a time: others wait for their masks meanwhile
QUEUE_FACTOR = 2  # sequences that may wait for each that may run
QUEUED_TOKENS = 2**23
MIN_QUEUE = 2048  # or so many, if that is more: clients that send all of a benchmark at once
ENCODER_TOKENS = 2048  # on a CPU: what passes between layers stays in its cache
DECAY_STEPS = 600  # over which the share reserved for output falls to its minimum


def schedule_plan(
    builder: PlanBuilder, gpu: Gpu | None, cache: CachePlan, facts: ModelFacts
) -> SchedulerPlan:
    """`gpu` is that of the plan, None on a CPU."""
    conservativeness = builder.args.schedule.schedule_conservativeness
    # Shares of the remaining output that admission reserves.
    ratio = min(0.7 * conservativeness, 1.0)
    ratio_min = 0.14 * ratio
    running = _max_running(builder, gpu)
    return build(
        SchedulerPlan,
        max_running=running,
        max_queued=_max_queued(builder, running.value),
        max_queued_tokens=_max_queued_tokens(builder),
        max_queue_time_s=builder.follow("max_queue_time"),
        chunk_tokens=_chunk_tokens(builder, gpu, cache.page_size, facts),
        max_prefill_tokens=_max_prefill_tokens(builder, gpu, facts),
        policy=_policy(builder, cache),
        mixed=builder.follow("enable_mixed_chunk"),
        overlap=_overlap(builder),
        new_token_ratio=Decision(ratio, f"0.7 x the conservativeness of {conservativeness:g}, up to 1"),
        min_new_token_ratio=Decision(ratio_min, "0.14 x the first value"),
        new_token_ratio_decay=Decision(
            (ratio - ratio_min) / DECAY_STEPS, f"from the first value to the smallest in {DECAY_STEPS} steps"
        ),
        open_ended_tokens=Decision(
            int(OPEN_ENDED_TOKENS * conservativeness),
            f"{OPEN_ENDED_TOKENS} x the conservativeness of {conservativeness:g}, until such outputs have ended",
        ),
        stream_interval=builder.follow("stream_interval"),
        log_interval_steps=builder.follow("decode_log_interval"),
        watchdog_timeout_s=builder.follow("watchdog_timeout"),
        crash_folder=builder.follow("crash_dump_folder"),
        micro_batches=Decision(builder.args.parallel.pp_size, "one for each stage of the pipeline"),
        max_micro_batch=builder.follow("max_micro_batch_size"),
        priorities=_priorities(builder),
        low_priority_first=builder.follow("schedule_low_priority_values_first"),
        preemption_threshold=builder.follow("priority_scheduling_preemption_threshold"),
        max_new_sequences=_max_new(builder),
        receive_interval=builder.follow("scheduler_recv_interval"),
        max_forced=builder.follow(
            "disable_jump_forward", 0 if builder.args.text.disable_jump_forward else MAX_FORCED
        ),
        forced_share=_forced_share(builder, gpu),
    )


def _forced_share(builder: PlanBuilder, gpu: Gpu | None) -> Decision[float]:
    if gpu is not None:
        return Decision(1.0, "a step with such a row is not captured: it must save a whole one")
    if not builder.args.schedule.enable_mixed_chunk:
        return Decision(1.0, "such a row takes a step of its own")
    return Decision(0.0, "a row of several tokens takes little more than one of a single token")


def _overlap(builder: PlanBuilder) -> Decision[bool]:
    if builder.args.parallel.pp_size > 1:
        return Decision(
            False, "stages overlap with each other instead; their batches need tokens that are known"
        )
    return builder.follow("disable_overlap_schedule", not builder.args.schedule.disable_overlap_schedule)


def _priorities(builder: PlanBuilder) -> Decision[bool]:
    asked = builder.args.schedule.enable_priority_scheduling
    if not asked and builder.args.schedule.schedule_low_priority_values_first:
        builder.refuse(
            "schedule_low_priority_values_first",
            "--schedule-low-priority-values-first needs --enable-priority-scheduling.",
        )
    return builder.follow("enable_priority_scheduling")


def _max_new(builder: PlanBuilder) -> Decision[int | None]:
    asked = builder.follow("prefill_only_one_req")
    return asked._replace(value=1 if asked.value else None)


def _max_running(builder: PlanBuilder, gpu: Gpu | None) -> Decision[int]:
    asked = builder.args.schedule.max_running_requests
    if asked is not None:
        return Decision(asked, "as asked")
    if gpu is None:
        return Decision(256, "enough for a CPU; the KV cache may allow fewer")
    return Decision(2048, "enough for a GPU; the KV cache may allow fewer")


def _max_queued(builder: PlanBuilder, running: int) -> Decision[int]:
    asked = builder.args.schedule.max_queued_requests
    if asked is not None:
        return Decision(asked, "as asked")
    reason = f"{QUEUE_FACTOR} x the sequences that may run, and no fewer than {MIN_QUEUE}"
    return Decision(max(QUEUE_FACTOR * running, MIN_QUEUE), reason)


def _max_queued_tokens(builder: PlanBuilder) -> Decision[int]:
    asked = builder.args.schedule.max_queued_tokens
    if asked is not None:
        return Decision(asked, "as asked")
    return Decision(QUEUED_TOKENS, "some hundred megabytes of prompts")


def _chunk_tokens(
    builder: PlanBuilder, gpu: Gpu | None, page_size: int, facts: ModelFacts
) -> Decision[int | None]:
    asked = builder.args.schedule.chunked_prefill_size
    if facts.needs_whole_prompts:
        if asked is not None and asked > 0:
            builder.refuse(
                "chunked_prefill_size",
                f"--chunked-prefill-size {asked}: {facts.architecture} computes texts whole; leave it out, and limit "
                "a step with --max-prefill-tokens.",
            )
        return Decision(None, "vectors of this model are made of all tokens, computed in one step")
    if asked is not None and asked <= 0:
        return Decision(None, "as asked: prompts are never cut")
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
        reason = f"by the GPU's {gibibytes:.0f} GiB of memory"
    whole = max(page_size, size // page_size * page_size)
    return Decision(whole, reason if whole == size else f"{reason}, in whole pages")


def _max_prefill_tokens(builder: PlanBuilder, gpu: Gpu | None, facts: ModelFacts) -> Decision[int]:
    asked = "max_prefill_tokens" in builder.args.explicitly_set
    if gpu is not None or not facts.is_encoder or asked:
        return builder.follow("max_prefill_tokens")
    size = max(ENCODER_TOKENS, facts.context_length)
    return Decision(
        size, "what passes between an encoder's layers stays in a CPU's cache, and every text fits"
    )


def _policy(builder: PlanBuilder, cache: CachePlan) -> Decision[str]:
    by_prefix = builder.args.schedule.schedule_policy in ("lpm", "dfs-weight")
    if by_prefix and not cache.prefix_cache:
        return Decision("fcfs", "without the prefix cache no prompt has a cached prefix")
    return builder.follow("schedule_policy")
