"""Options about scheduling: who runs next, how much work a step takes, how often results are sent."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_spec import always, inert, option
from runtime.config.plan import SchedulerPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleArgs:
    """Scheduling."""

    max_running_requests: int | None = option(
        None,
        "Largest number of sequences that run together. Default: 256 on a CPU and 2048 on a GPU, and never "
        "more than the KV cache can hold.",
        low=1,
        sglang="half as many as the KV cache has tokens, at most 2048 to 4096 by the length of the context",
        plan=SchedulerPlan.max_running,
    )
    max_queued_requests: int | None = option(
        None,
        "Longest waiting queue. A request that finds it full is answered with status 503 and Retry-After; prompts of "
        "one call are let in together. Default: 2048, or twice --max-running-requests if that is more; no limit for an "
        "Engine in Python.",
        low=1,
        sglang="no limit",
        plan=SchedulerPlan.max_queued,
    )
    max_queued_tokens: int | None = option(
        None,
        "Prompt tokens that may wait, those of each choice counted. A request that finds more waiting, or that would "
        "make it more, is answered with status 503 and Retry-After, unless nothing waits. Default: 8388608, some "
        "hundred megabytes; no limit for an Engine in Python.",
        low=1,
        plan=SchedulerPlan.max_queued_tokens,
    )
    max_queue_time: float | None = option(
        None,
        "Seconds that a request may wait before it runs; then it is answered with status 503 and Retry-After. "
        "Default: no limit.",
        above=0,
        plan=SchedulerPlan.max_queue_time_s,
    )
    chunked_prefill_size: int | None = option(
        None,
        "Prompt tokens computed in one step; a longer prompt is cut into pieces of this size, "
        "rounded up to whole pages. -1 never cuts. Default: 4096 without a GPU, 2048 to 16384 by GPU memory.",
        low=-1,
        plan=SchedulerPlan.chunk_tokens,
    )
    max_prefill_tokens: int = option(
        16384,
        "Prompt tokens that one step may take on from all requests together. The first request is always "
        "admitted, however long. Default of encoders on a CPU: 2048, or their longest text.",
        low=1,
        plan=SchedulerPlan.max_prefill_tokens,
    )
    schedule_policy: str = option(
        "fcfs",
        "Order of the waiting queue. fcfs: first come, first served; lpm: longest cached prefix first; "
        "dfs-weight: by the prefix tree; lof: longest output first; random.",
        choices=("fcfs", "lpm", "random", "dfs-weight", "lof"),
        plan=SchedulerPlan.policy,
    )
    schedule_conservativeness: float = option(
        1.0,
        "How much room admission keeps free for the output of running requests. Above 1 fewer requests have "
        "to be put back; below 1 more run at once.",
        low=0,
        plan=SchedulerPlan.new_token_ratio,
        says="other",
    )
    stream_interval: int = option(
        1,
        "Send streamed output every so many tokens; the first token is always sent at once. Larger values "
        "cost less and look less smooth.",
        low=1,
        plan=SchedulerPlan.stream_interval,
    )
    watchdog_timeout: float = option(
        300,
        "Seconds that one step may take before the engine is declared stuck, says where, and stops.",
        above=0,
        plan=SchedulerPlan.watchdog_timeout_s,
    )
    disable_overlap_schedule: bool = option(
        False,
        "Wait for the tokens of a step before the next one is prepared. Slower; useful to find mistakes.",
        plan=SchedulerPlan.overlap,
        says="the opposite",
    )
    enable_mixed_chunk: bool = option(
        True,
        "Let prompts and running sequences share a step, so that a long prompt does not stop the others' "
        "output. On by default.",
        sglang="off",
        plan=SchedulerPlan.mixed,
    )
    sleep_on_idle: bool = always(
        False,
        "Use no processor time while nothing is to be done.",
        reason="the event loop waits without computing",
    )
    prefill_only_one_req: bool = option(
        False,
        "Take on at most one new sequence in each step.",
        const=True,
        plan=SchedulerPlan.max_new_sequences,
    )
    stream_output: bool = always(
        False,
        "Without a tokenizer: send only the new token ids with each piece instead of all so far.",
        reason="each piece of a stream has the new token ids only",
        sglang="off: without a tokenizer each piece has all token ids so far",
    )
    num_continuous_decode_steps: int = inert(
        1,
        "Decode steps between two looks at the queue.",
        reason="the option had already lost its effect where it comes from",
        low=1,
    )
    scheduler_recv_interval: int = option(
        1,
        "Look for new and aborted requests only every so many steps while others run.",
        low=1,
        plan=SchedulerPlan.receive_interval,
    )
    enable_priority_scheduling: bool = option(
        False,
        "Order waiting requests by their field `priority`, higher numbers first, and then as --schedule-policy "
        "says. Where the queue is full, a request displaces the newest of the lowest priority, which is answered "
        "with status 503. Requests without one come last. Every client may say how important it is.",
        plan=SchedulerPlan.priorities,
    )
    schedule_low_priority_values_first: bool = option(
        False,
        "Put lower priority numbers before higher ones, as vLLM does.",
        plan=SchedulerPlan.low_priority_first,
    )
    priority_scheduling_preemption_threshold: int = option(
        10,
        "A waiting request that cannot run interrupts running ones whose priority is lower by more than this; what "
        "they have computed stays cached where there is room, and they go on later with the same tokens.",
        low=0,
        plan=SchedulerPlan.preemption_threshold,
    )
