"""What scheduling costs: `fill` and `apply` of the real schedule, without a model behind them."""

from __future__ import annotations

from collections import deque
from time import thread_time_ns
from typing import NamedTuple

from runtime.batch import Batch, StepOutput
from runtime.config.plan import SchedulerPlan
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from runtime.scheduler.scheduler import Scheduler
from runtime.sequence import Sequence
from serve.bench.metrics import Summary, summarize

BUDGET_US = 500.0  # at 256 running
PROMPT_TOKENS = 128
VOCAB = 32_000
FIRST_WORD = 300  # below are special tokens and single bytes, of which not every one is a text
DEPTH = 1  # steps in flight while the next one is filled, as with overlap


class SchedulingCost(NamedTuple):
    """Microseconds of CPU time per step of steady decoding: neighbours on the machine count less."""

    running: int
    page_size: int
    steps: int
    step_us: Summary  # fill and apply together
    fill_us: Summary
    apply_us: Summary

    @property
    def within_budget(self) -> bool:
        """Whether the median step keeps the promise."""
        return self.step_us.median <= BUDGET_US


def measure_scheduling(*, running: int, page_size: int, steps: int) -> SchedulingCost:
    """Decode `running` sequences for `steps` steps and time the schedule's part of each.

    The sequences differ from their first token, so the prefix tree is as wide as it gets; prompts are
    computed before the clock starts and nobody finishes while it runs.
    """
    schedule = _fill_up(running, page_size, steps)
    fills, applies = [], []
    in_flight: deque[Batch] = deque()
    while len(applies) < steps:
        began = thread_time_ns()
        batch = schedule.fill()
        filled = thread_time_ns()
        if batch is None or len(batch.sequences) != running:
            raise RuntimeError("A step did not hold every sequence.")
        in_flight.append(batch)
        if len(in_flight) <= DEPTH:
            continue
        oldest = in_flight.popleft()
        output = scripted_output(oldest)
        apply_began = thread_time_ns()
        schedule.apply(oldest, output)
        applies.append((thread_time_ns() - apply_began) / 1e3)
        fills.append((filled - began) / 1e3)
    totals = summarize(fill + apply for fill, apply in zip(fills, applies))
    fill_us, apply_us = summarize(fills), summarize(applies)
    if totals is None or fill_us is None or apply_us is None:
        raise ValueError("At least one step must be measured.")
    return SchedulingCost(running, page_size, steps, totals, fill_us, apply_us)


def scripted_output(batch: Batch) -> StepOutput:
    """One token for every row that samples, decided by the step's number; never a special one."""
    tokens: list[list[int]] = [[] for _ in batch.sequences]
    if batch.sampling is not None:
        for row in batch.sampling.row_of.tolist():
            tokens[row] = [FIRST_WORD + (batch.number * 31 + row) % (VOCAB - FIRST_WORD)]
    return StepOutput(tokens, [])


def _fill_up(running: int, page_size: int, steps: int) -> Scheduler:
    """A schedule in which every sequence's prompt is computed and its first token known."""
    output = steps + 16
    pages = running * -(-(PROMPT_TOKENS + output) // page_size) + running
    plan = SchedulerPlan(
        max_running=running,
        max_queued=running,
        chunk_tokens=None,
        max_prefill_tokens=running * PROMPT_TOKENS,
        policy="fcfs",
        mixed=True,
        overlap=True,
        new_token_ratio=1.0,
        min_new_token_ratio=1.0,
        new_token_ratio_decay=0.0,
        stream_interval=1,
        log_interval_steps=40,
        watchdog_timeout_s=0.0,
    )
    cache = PrefixCache(pages, page_size)
    schedule = Scheduler(plan, cache, vocab_size=VOCAB, context_length=PROMPT_TOKENS + output)
    for number in range(running):
        schedule.add(_sequence(number, output))
    while schedule.num_waiting:
        batch = schedule.fill()
        if batch is None:
            raise RuntimeError("The schedule did not take every sequence.")
        schedule.apply(batch, scripted_output(batch))
    return schedule


def _sequence(number: int, output: int) -> Sequence:
    ids = [(number * PROMPT_TOKENS + position) % VOCAB for position in range(PROMPT_TOKENS)]
    sampling = SamplingParams(max_new_tokens=output, temperature=0.0, ignore_eos=True)
    request = Request(ids=tuple(ids), sampling=sampling)
    limit = PROMPT_TOKENS + output
    return Sequence(request, 0, ids, max_tokens=limit, stop_ids=frozenset(), seed=number)
