"""The numbers themselves: plain counters and histograms, written on the event loop and read at a scrape.

Writing one costs tenths of a microsecond, where a histogram of prometheus-client costs two: it has locks for threads
that we do not have.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING

from runtime.config import buckets
from runtime.config.buckets import Bounds
from runtime.errors import ContextOverflow, EngineClosed, Overloaded, PenstockError, RequestError

if TYPE_CHECKING:
    from runtime.batch import Batch
    from runtime.config.plan import ObservePlan

MAX_LABEL_SETS = 1000  # that requests may make with their header; what comes after is counted under OTHER
OTHER = "other"
REASONS = ("invalid", "too_long", "overloaded", "closed", "failed")
ROW_BOUNDS: Bounds = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0)


class Histogram:
    """How often values fell between bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        # By the first bound that is at least the value; the last: above all.
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[int]:
        """Of each bound, how many values were at most it; the last entry counts all."""
        return list(accumulate(self.counts))


class RequestSeries:
    """What is counted of the requests with the same labels."""

    def __init__(self, plan: ObservePlan) -> None:
        self.num_requests = 0
        self.num_aborted = 0
        self.num_with_grammar = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        self.first_token_s = Histogram(plan.ttft_bounds)
        self.between_tokens_s = Histogram(plan.itl_bounds)
        self.whole_s = Histogram(plan.e2e_bounds)
        self.prompt_lengths = Histogram(plan.prompt_bounds) if plan.prompt_bounds else None
        self.output_lengths = Histogram(plan.output_bounds) if plan.output_bounds else None

    def ended(self, duration_s: float, prompt: int, output: int, cached: int, *, grammar: bool) -> None:
        """A request ended: with all its choices' tokens."""
        self.num_requests += 1
        self.num_with_grammar += grammar
        self.prompt_tokens += prompt
        self.output_tokens += output
        self.cached_tokens += cached
        self.whole_s.observe(duration_s)
        if self.prompt_lengths is not None:
            self.prompt_lengths.observe(prompt)
        if self.output_lengths is not None:
            self.output_lengths.observe(output)


class ReplicaSeries:
    """What is counted of one replica's steps."""

    def __init__(self) -> None:
        self.queue_s = Histogram(buckets.QUEUE_TIME)
        self.step_s = {kind: Histogram(buckets.SHORT) for kind in ("prefill", "decode", "mixed")}
        self.step_rows = Histogram(ROW_BOUNDS)
        self.prompt_tokens = 0  # computed
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.num_steps = 0
        self.lookups: Counter[str] = Counter(hit=0, miss=0)
        self.hit_rate = 0.0  # of the last step with prompts

    def launched(self, batch: Batch) -> None:
        """A step was launched."""
        stats = batch.stats
        if not stats.num_prompt_tokens:
            return
        self.prompt_tokens += stats.num_prompt_tokens
        self.cached_tokens += stats.num_cached_tokens
        self.hit_rate = stats.num_cached_tokens / (stats.num_cached_tokens + stats.num_prompt_tokens)

    def entered(self, waited_s: float, num_cached: int) -> None:
        """A sequence is in a step for the first time."""
        self.queue_s.observe(max(waited_s, 0.0))
        self.lookups["hit" if num_cached > 0 else "miss"] += 1

    def applied(self, batch: Batch, duration_s: float, num_tokens: int) -> None:
        """A step's results are there."""
        stats = batch.stats
        kind = "decode" if not stats.num_prompt_tokens else "mixed" if stats.num_decode_rows else "prefill"
        self.num_steps += 1
        self.generated_tokens += num_tokens
        self.step_s[kind].observe(duration_s)
        self.step_rows.observe(len(batch.sequences))


class EngineMetrics:
    """All that one engine counts."""

    def __init__(self, plan: ObservePlan, num_replicas: int) -> None:
        self.plan = plan
        self.replicas = [ReplicaSeries() for _ in range(num_replicas)]
        self.requests: dict[tuple[str, ...], RequestSeries] = {}  # by the values of the labels from a header
        self.loop_lag_s = Histogram(buckets.SHORT)
        self.tokenizer_s = Histogram(buckets.SHORT)
        self.rejected: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.http: Counter[tuple[str, int]] = Counter()  # by path and status
        self.startup_s = 0.0
        self.of_labels(("",) * len(plan.request_labels))

    def of_labels(self, values: tuple[str, ...]) -> RequestSeries:
        """The series of requests with these values, one for each of `plan.request_labels`."""
        series = self.requests.get(values)
        if series is None:
            if len(self.requests) >= MAX_LABEL_SETS:
                values = (OTHER,) * len(values)
                if values in self.requests:
                    return self.requests[values]
            series = self.requests[values] = RequestSeries(self.plan)
        return series

    def refused(self, error: PenstockError) -> None:
        """A request was refused, or failed."""
        self.rejected[reason_of(error)] += 1


def reason_of(error: PenstockError) -> str:
    """The label `reason` of an error."""
    if isinstance(error, ContextOverflow):
        return "too_long"
    if isinstance(error, RequestError):
        return "invalid"
    if isinstance(error, Overloaded):
        return "overloaded"
    return "closed" if isinstance(error, EngineClosed) else "failed"
