"""Options about scheduling: who runs next, how much work a step takes, how often results are sent."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated

from runtime.config.option_spec import OptionSpec, inert, planned


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleArgs:
    """Scheduling."""

    max_running_requests: Annotated[
        int | None,
        OptionSpec(
            "Largest number of sequences that run together. Default: 256 on a CPU and 2048 on a "
            "GPU, and never more than the KV cache can hold.",
            low=1,
            plan="schedule.max_running",
        ),
    ] = None
    max_queued_requests: Annotated[
        int,
        OptionSpec(
            "Longest waiting queue. A request that finds it full is answered with status 503. Default: no "
            "limit.",
            low=1,
            plan="schedule.max_queued",
        ),
    ] = sys.maxsize
    chunked_prefill_size: Annotated[
        int | None,
        OptionSpec(
            "Prompt tokens computed in one step; a longer prompt is cut into pieces of this size, a "
            "multiple of the page size. -1 never cuts. Default: 4096 without a GPU, 2048 to 16384 by GPU "
            "memory.",
            low=-1,
            plan="schedule.chunk_tokens",
        ),
    ] = None
    max_prefill_tokens: Annotated[
        int,
        OptionSpec(
            "Prompt tokens that one step may take on from all requests together. The first request is always "
            "admitted, however long.",
            low=1,
            plan="schedule.max_prefill_tokens",
        ),
    ] = 16384
    schedule_policy: Annotated[
        str,
        OptionSpec(
            "Order of the waiting queue. fcfs: first come, first served; lpm: longest cached prefix first; "
            "dfs-weight: by the prefix tree; lof: longest output first; random.",
            choices=("fcfs", "lpm", "random", "dfs-weight", "lof"),
            built=("fcfs", "lpm"),
            plan="schedule.policy",
        ),
    ] = "fcfs"
    schedule_conservativeness: Annotated[
        float,
        OptionSpec(
            "How much room admission keeps free for the output of running requests. Above 1 fewer requests "
            "have to be put back; below 1 more run at once.",
            low=0,
            plan="schedule.new_token_ratio",
        ),
    ] = 1.0
    stream_interval: Annotated[
        int,
        OptionSpec(
            "Send streamed output every so many tokens; the first token is always sent at once. Larger "
            "values cost less and look less smooth.",
            low=1,
            plan="schedule.stream_interval",
        ),
    ] = 1
    watchdog_timeout: Annotated[
        float,
        OptionSpec(
            "Seconds that one step may take before the engine is declared stuck, says where, and stops.",
            above=0,
            plan="schedule.watchdog_timeout_s",
        ),
    ] = 300
    disable_overlap_schedule: Annotated[
        bool,
        OptionSpec(
            "Wait for the tokens of a step before the next one is prepared. Slower; useful to find mistakes.",
            plan="schedule.overlap",
        ),
    ] = False
    enable_mixed_chunk: Annotated[
        bool,
        OptionSpec(
            "Let prompts and running sequences share a step, so that a long prompt does not stop the others' "
            "output. On by default.",
            plan="schedule.mixed",
        ),
    ] = True
    sleep_on_idle: Annotated[
        bool, OptionSpec("Use no processor time while nothing is to be done. This is always so here.")
    ] = False
    prefill_only_one_req: Annotated[
        bool, planned("Take on at most one new request in each step.", const=True)
    ] = False
    stream_output: Annotated[
        bool,
        planned("Without a tokenizer: send only the new token ids with each piece instead of all so far."),
    ] = False
    num_continuous_decode_steps: Annotated[
        int,
        inert(
            "Decode steps between two looks at the queue.",
            because="the option had already lost its effect where it comes from",
            low=1,
        ),
    ] = 1
    scheduler_recv_interval: Annotated[
        int, planned("Look for new requests only every so many steps.", low=1)
    ] = 1
    enable_priority_scheduling: Annotated[
        bool, planned("Order requests by their priority, and let important ones interrupt others.")
    ] = False
    schedule_low_priority_values_first: Annotated[
        bool, planned("Treat lower priority numbers as more important.")
    ] = False
    priority_scheduling_preemption_threshold: Annotated[
        int, planned("Smallest difference in priority that interrupts a running request.", low=0)
    ] = 10
