"""The scheduler's section of the plan."""

from __future__ import annotations

from ops.machine import GIB, Gpu
from runtime.config.plan import SchedulePlan
from runtime.config.resolve.plan_builder import PlanBuilder

DECAY_STEPS = 600  # over which the share reserved for output falls to its minimum


def schedule_plan(builder: PlanBuilder, gpu: Gpu | None, page_size: int) -> SchedulePlan:
    ratio, ratio_min = _new_token_ratio(builder)
    why_decay = f"from the first value to the smallest in {DECAY_STEPS} steps"
    return SchedulePlan(
        max_running=_max_running(builder, gpu),
        max_queued=builder.take("schedule.max_queued", "max_queued_requests"),
        chunk_tokens=_chunk_tokens(builder, gpu, page_size),
        max_prefill_tokens=builder.take("schedule.max_prefill_tokens", "max_prefill_tokens"),
        policy=_policy(builder),
        mixed=builder.take("schedule.mixed", "enable_mixed_chunk"),
        overlap=_overlap(builder),
        new_token_ratio=ratio,
        min_new_token_ratio=ratio_min,
        new_token_ratio_decay=builder.decide(
            "schedule.new_token_ratio_decay", (ratio - ratio_min) / DECAY_STEPS, why_decay
        ),
        stream_interval=builder.take("schedule.stream_interval", "stream_interval"),
        log_interval_steps=builder.take("schedule.log_interval_steps", "decode_log_interval"),
        watchdog_timeout_s=builder.take("schedule.watchdog_timeout_s", "watchdog_timeout"),
        micro_batches=builder.decide(
            "schedule.micro_batches", builder.args.parallel.pp_size, "one for each stage of the pipeline"
        ),
        max_micro_batch=builder.take("schedule.max_micro_batch", "max_micro_batch_size"),
    )


def _overlap(builder: PlanBuilder) -> bool:
    if builder.args.parallel.pp_size > 1:
        why = "stages overlap with each other instead; their batches need tokens that are known"
        return builder.decide("schedule.overlap", False, why)
    asked = builder.args.schedule.disable_overlap_schedule
    return builder.take("schedule.overlap", "disable_overlap_schedule", not asked)


def _max_running(builder: PlanBuilder, gpu: Gpu | None) -> int:
    asked = builder.args.schedule.max_running_requests
    if asked is not None:
        return builder.decide("schedule.max_running", asked, "as asked")
    if gpu is None:
        return builder.decide("schedule.max_running", 256, "enough for a CPU; the KV cache may allow fewer")
    return builder.decide("schedule.max_running", 2048, "enough for a GPU; the KV cache may allow fewer")


def _chunk_tokens(builder: PlanBuilder, gpu: Gpu | None, page_size: int) -> int | None:
    place = "schedule.chunk_tokens"
    asked = builder.args.schedule.chunked_prefill_size
    if asked is not None and asked <= 0:
        return builder.decide(place, None, "as asked: prompts are never cut")
    if asked is not None:
        if asked % page_size:
            builder.refuse(
                "chunked_prefill_size",
                f"--chunked-prefill-size {asked} must be a multiple of the page size, {page_size}.",
            )
        return builder.decide(place, asked, "as asked")
    if gpu is None:
        size, why = 4096, "the default without a GPU"
    else:
        gibibytes = gpu.memory_bytes / GIB
        size = 2048 if gibibytes < 35 else 8192 if gibibytes < 160 else 16384
        why = f"by the GPU's {gibibytes:.0f} GiB of memory"
    whole = max(page_size, size // page_size * page_size)
    return builder.decide(place, whole, why if whole == size else f"{why}, in whole pages")


def _policy(builder: PlanBuilder) -> str:
    policy = builder.args.schedule.schedule_policy
    if policy == "lpm" and builder.args.cache.disable_radix_cache:
        return builder.decide(
            "schedule.policy", "fcfs", "without the prefix cache no prompt has a cached prefix"
        )
    return builder.take("schedule.policy", "schedule_policy")


def _new_token_ratio(builder: PlanBuilder) -> tuple[float, float]:
    """(first, smallest) share of the remaining output that admission reserves."""
    conservativeness = builder.args.schedule.schedule_conservativeness
    first = min(0.7 * conservativeness, 1.0)
    builder.decide(
        "schedule.new_token_ratio", first, f"0.7 x the conservativeness of {conservativeness:g}, up to 1"
    )
    return first, builder.decide("schedule.min_new_token_ratio", 0.14 * first, "0.14 x the first value")
