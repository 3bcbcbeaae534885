"""Options about scheduling: admission, the size of a step, and how often results are sent."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.config.option_spec import Json, always, inert, option


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleArgs:
    """Scheduling."""

    max_running_requests: int | None = option(
        None,
        "Maximum number of sequences that run together. Default: 256 on a CPU and 2048 on a GPU, but never more than "
        "fit into the KV cache.",
        low=1,
        sglang="half the number of tokens of the KV cache, at most 2048 to 4096, depending on the context length",
        plan="scheduler.max_running",
    )
    max_queued_requests: int | None = option(
        None,
        "Maximum number of waiting requests. If the queue is full, a new request is answered with status 503 and "
        "Retry-After. The prompts of one call are accepted or refused together. Default: 2048, or twice "
        "--max-running-requests if that is more; no limit for an Engine in Python.",
        low=1,
        sglang="no limit",
        plan="scheduler.max_queued",
    )
    max_queued_tokens: int | None = option(
        None,
        "Maximum number of waiting prompt tokens; a prompt counts once for each of its choices. A request that would "
        "exceed the limit is answered with status 503 and Retry-After, unless the queue is empty. Default: 8388608, "
        "which is a few hundred megabytes; no limit for an Engine in Python.",
        low=1,
        plan="scheduler.max_queued_tokens",
    )
    max_queue_time: float | None = option(
        None,
        "Seconds that a request may wait in the queue. A request that waits longer is answered with status 503 and "
        "Retry-After. Default: no limit.",
        above=0,
        plan="scheduler.max_queue_time_s",
    )
    chunked_prefill_size: int | None = option(
        None,
        "Maximum number of prompt tokens computed in one step. Longer prompts are divided into chunks of this size, "
        "rounded up to whole pages. -1: no chunks. Default: 4096 on a CPU; 2048 to 16384 on a GPU, depending on its "
        "memory.",
        low=-1,
        plan="scheduler.chunk_tokens",
    )
    max_prefill_tokens: int = option(
        16384,
        "Maximum number of prompt tokens that one step admits, over all requests. The first request is always "
        "admitted, even if it is longer. Default for encoders on a CPU: 2048, or the context length if that is more.",
        low=1,
        plan="scheduler.max_prefill_tokens",
    )
    schedule_policy: str = option(
        "fcfs",
        "Order of the waiting queue. fcfs: first come, first served; lpm: longest cached prefix first; dfs-weight: "
        "depth-first in the prefix tree, branches with most requests first; lof: longest output first; random.",
        choices=("fcfs", "lpm", "random", "dfs-weight", "lof"),
        plan="scheduler.policy",
    )
    schedule_conservativeness: float = option(
        1.0,
        "Scales the pages that admission reserves for the output of running requests. Above 1, fewer requests are "
        "preempted; below 1, more requests run at once.",
        low=0,
        plan="scheduler.new_token_ratio",
        other_unit=True,
    )
    stream_interval: int = option(
        1,
        "Number of tokens per piece of streamed output. The first token is always sent at once. Larger values cost "
        "less but stream less smoothly.",
        low=1,
        plan="scheduler.stream_interval",
    )
    watchdog_timeout: float = option(
        300,
        "Seconds that one step may take. If a step takes longer, the engine logs all stacks and stops.",
        above=0,
        plan="scheduler.watchdog_timeout_s",
    )
    disable_overlap_schedule: bool = option(
        False,
        "Wait for the tokens of a step before the next step is prepared. Slower, but useful for debugging.",
        plan="scheduler.overlap",
        invert=True,
    )
    enable_mixed_chunk: bool = option(
        True,
        "Allow prefill and decode in the same step, so that a long prompt does not stall the output of running "
        "requests. On by default.",
        sglang="off",
        plan="scheduler.mixed",
    )
    target_inter_token_latency: float | None = option(
        None,
        "Target in milliseconds for the time between two tokens of a stream. A step that has both decode and prompt "
        "rows computes only as many prompt tokens as fit into this time, by the measured speed of steps; long prompts "
        "are cut. Lower values smooth streams and delay first tokens. Needs chunked prefill. Default: no target.",
        above=0,
        plan="scheduler.target_token_ms",
    )
    sleep_on_idle: bool = always(
        False,
        "Use no CPU time while the engine is idle.",
        reason="the event loop blocks while it is idle",
    )
    prefill_only_one_req: bool = option(
        False,
        "Admit at most one new sequence per step.",
        const=True,
        plan="scheduler.max_new_sequences",
    )
    stream_output: bool = always(
        False,
        "Without a tokenizer: each piece of a stream holds only the new token ids, not all token ids so far.",
        reason="each piece of a stream holds only the new token ids",
        sglang="off: without a tokenizer each piece holds all token ids so far",
    )
    num_continuous_decode_steps: int = inert(
        1,
        "Decode steps between two checks of the queue.",
        reason="it no longer has an effect in SGLang either",
        low=1,
    )
    scheduler_recv_interval: int = option(
        1,
        "Steps between two checks for new and aborted requests while other requests run.",
        low=1,
        plan="scheduler.receive_interval",
    )
    enable_priority_scheduling: bool = option(
        False,
        "Order waiting requests by their field `priority`, higher numbers first, and requests of equal priority by "
        "--schedule-policy. If the queue is full, a new request displaces the newest request of the lowest priority, "
        "which is answered with status 503. Requests without a priority come last. Clients are trusted: each sets "
        "its own priority.",
        plan="scheduler.priorities",
    )
    schedule_low_priority_values_first: bool = option(
        False,
        "Put lower priority numbers before higher ones, as vLLM does.",
        plan="scheduler.low_priority_first",
    )
    service_tier_priorities: Json = option(
        {},
        "JSON object that maps values of the field service_tier to priorities, for requests without a priority, for "
        'example {"priority": 100, "default": 0, "flex": -100}. Requests without a tier, and tiers that are not '
        "listed, count as default. Needs --enable-priority-scheduling. Default: tiers have no effect.",
        plan="scheduler.tiers",
    )
    api_key_weights: Json = option(
        {},
        "JSON object that maps names of --api-key-file to weights. While several keys have requests, their running "
        'requests are in proportion to their weights, for example {"chat": 4, "batch": 1}. Other keys have weight 1. '
        "Default: all keys have equal shares.",
        plan="scheduler.owner_weights",
    )
    max_predicted_first_token: float | None = option(
        None,
        "Seconds. A request is answered with status 503 and Retry-After at once if its first token is predicted to "
        "take longer, by the waiting prompts and the measured speed of steps. Default: no limit.",
        above=0,
        plan="scheduler.max_first_token_s",
    )
    priority_scheduling_preemption_threshold: int = option(
        10,
        "A waiting request that does not fit preempts running requests whose priority is lower by more than this "
        "number. Preempted requests resume later with the same tokens; their KV stays cached if there is room.",
        low=0,
        plan="scheduler.preemption_threshold",
    )
