"""Counters and histograms that the event loop updates and a scrape reads.

An observation takes a few tenths of a microsecond. It would take two microseconds with a histogram of
prometheus-client, which takes a lock. A single thread needs no lock.
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

MAX_LABEL_SETS = 1000  # maximum number of label combinations from request headers; later ones count as OTHER
OTHER = "other"
REASONS = ("invalid", "too_long", "overloaded", "closed", "failed")
ROW_BOUNDS: Bounds = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0)


class Histogram:
    """A histogram with fixed bounds."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        # counts[i]: values above bounds[i - 1] and up to bounds[i]; the last entry counts values above all bounds.
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value `times` times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def cumulative(self) -> list[int]:
        """Return the number of values up to each bound, followed by the number of all values."""
        return list(accumulate(self.counts))


class RequestSeries:
    """Metrics of all requests that have the same label values."""

    def __init__(self, plan: ObservePlan) -> None:
        self.num_requests = 0
        self.num_aborted = 0
        self.num_with_grammar = 0
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.cached_tokens = 0
        self.first_token_s = Histogram(plan.ttft_bounds)
        self.predicted_first_token_s = Histogram(plan.ttft_bounds)
        self.prediction_error_s = Histogram(plan.ttft_bounds)
        self.between_tokens_s = Histogram(plan.itl_bounds)
        self.whole_s = Histogram(plan.e2e_bounds)
        self.prompt_lengths = Histogram(plan.prompt_bounds) if plan.prompt_bounds else None
        self.output_lengths = Histogram(plan.output_bounds) if plan.output_bounds else None

    def predicted(self, predicted_s: float, first_token_s: float) -> None:
        """Record a request's predicted and measured time to first token."""
        self.predicted_first_token_s.observe(predicted_s)
        self.prediction_error_s.observe(abs(predicted_s - first_token_s))

    def ended(self, duration_s: float, prompt: int, output: int, cached: int, *, grammar: bool) -> None:
        """Count a finished request. The numbers of tokens are sums over all its choices."""
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
    """Metrics of one replica's steps."""

    def __init__(self) -> None:
        self.queue_s = Histogram(buckets.QUEUE_TIME)
        self.step_s = {kind: Histogram(buckets.SHORT) for kind in ("prefill", "decode", "mixed")}
        self.step_rows = Histogram(ROW_BOUNDS)
        self.prompt_tokens = 0  # prompt tokens that steps computed
        self.cached_tokens = 0  # prompt tokens from the prefix cache
        self.generated_tokens = 0
        self.num_steps = 0
        self.lookups: Counter[str] = Counter(hit=0, miss=0)
        self.hit_rate = 0.0  # share of cached prompt tokens in the last step with prompts

    def launched(self, batch: Batch) -> None:
        """Count the prompt tokens of a launched step. A step without prompt tokens changes nothing."""
        stats = batch.stats
        if not stats.num_prompt_tokens:
            return
        self.prompt_tokens += stats.num_prompt_tokens
        self.cached_tokens += stats.num_cached_tokens
        self.hit_rate = stats.num_cached_tokens / (stats.num_cached_tokens + stats.num_prompt_tokens)

    def entered(self, waited_s: float, num_cached: int) -> None:
        """Count a sequence that is in a step for the first time, after `waited_s` seconds in the queue."""
        self.queue_s.observe(max(waited_s, 0.0))
        self.lookups["hit" if num_cached > 0 else "miss"] += 1

    def applied(self, batch: Batch, duration_s: float, num_tokens: int) -> None:
        """Count a step whose results have arrived."""
        stats = batch.stats
        kind = "decode" if not stats.num_prompt_tokens else "mixed" if stats.num_decode_rows else "prefill"
        self.num_steps += 1
        self.generated_tokens += num_tokens
        self.step_s[kind].observe(duration_s)
        self.step_rows.observe(len(batch.sequences))


class EngineMetrics:
    """All metrics of one engine."""

    def __init__(self, plan: ObservePlan, num_replicas: int) -> None:
        self.plan = plan
        self.replicas = [ReplicaSeries() for _ in range(num_replicas)]
        self.requests: dict[tuple[str, ...], RequestSeries] = {}  # keys are the label values of a request's header
        self.loop_lag_s = Histogram(buckets.SHORT)
        self.tokenizer_s = Histogram(buckets.SHORT)
        self.rejected: Counter[str] = Counter(dict.fromkeys(REASONS, 0))
        self.http: Counter[tuple[str, int]] = Counter()  # number of responses by (path, status)
        self.startup_s = 0.0
        self.of_labels(("",) * len(plan.request_labels))

    def of_labels(self, values: tuple[str, ...]) -> RequestSeries:
        """Return the series for these values of `plan.request_labels`. If there are too many, return OTHER's series."""
        series = self.requests.get(values)
        if series is None:
            if len(self.requests) >= MAX_LABEL_SETS:
                values = (OTHER,) * len(values)
                if values in self.requests:
                    return self.requests[values]
            series = self.requests[values] = RequestSeries(self.plan)
        return series

    def refused(self, error: PenstockError) -> None:
        """Count a refused or failed request."""
        self.rejected[reason_of(error)] += 1


def reason_of(error: PenstockError) -> str:
    """Return the value of the label `reason` for an error."""
    if isinstance(error, ContextOverflow):
        return "too_long"
    if isinstance(error, RequestError):
        return "invalid"
    if isinstance(error, Overloaded):
        return "overloaded"
    return "closed" if isinstance(error, EngineClosed) else "failed"
