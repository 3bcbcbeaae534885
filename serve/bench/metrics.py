"""Statistics of a run: percentiles, latencies, throughput and goodput. All functions are pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from runtime.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The measurements of one request, in seconds. If `error` is set, only the first three fields are valid."""

    started_s: float  # when the request was sent, counted from the start of the run
    e2e_s: float  # from sending to the last byte
    prompt_tokens: int
    ttft_s: float = 0.0  # from sending to the first output
    decode_s: float = 0.0  # from the first output to the last
    itl_s: tuple[float, ...] = ()
    output_tokens: int = 0
    cached_tokens: int | None = None
    text: str = ""
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first, in seconds. None if the output has fewer than two tokens."""
        return self.decode_s / (self.output_tokens - 1) if self.output_tokens > 1 else None


class Summary(NamedTuple):
    """Statistics of a set of values: mean, percentiles, minimum and maximum."""

    mean: float
    median: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Return the percentile of an ascending sequence, with linear interpolation. Raises `ValueError` if it is empty."""
    if not ordered:
        raise ValueError("An empty sequence has no percentiles.")
    position = (len(ordered) - 1) * percent / 100
    low, high = math.floor(position), math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarize(values: Iterable[float], scale: float = 1.0) -> Summary | None:
    """Return statistics of `values`, each multiplied by `scale`, or None if there are no values."""
    ordered = sorted(value * scale for value in values)
    if not ordered:
        return None
    return Summary(
        mean=math.fsum(ordered) / len(ordered),
        median=percentile(ordered, 50),
        p90=percentile(ordered, 90),
        p95=percentile(ordered, 95),
        p99=percentile(ordered, 99),
        min=ordered[0],
        max=ordered[-1],
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The results of one run. Rates are per second. Only tokens of successful requests count."""

    duration_s: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    cached_tokens: int | None
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    mean_concurrency: float
    peak_concurrency: int
    goodput_requests_per_s: float | None
    ttft_ms: Summary | None
    itl_ms: Summary | None
    tpot_ms: Summary | None
    e2e_ms: Summary | None
    errors: dict[str, int] = field(default_factory=dict)  # message -> number of requests


def measure(outcomes: Sequence[Outcome], duration_s: float, objectives: Mapping[str, float] | None = None) -> Results:
    """Return the results of a run of `duration_s` seconds. `objectives`: see `parse_objectives`, used for goodput."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    output_tokens = sum(outcome.output_tokens for outcome in good)
    cached = [outcome.cached_tokens for outcome in good if outcome.cached_tokens is not None]
    met = None if not objectives else sum(meets(outcome, objectives) for outcome in good) / duration_s
    return Results(
        duration_s=duration_s,
        completed=len(good),
        failed=len(outcomes) - len(good),
        input_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=sum(cached) if cached else None,
        requests_per_s=len(good) / duration_s,
        input_tokens_per_s=prompt_tokens / duration_s,
        output_tokens_per_s=output_tokens / duration_s,
        total_tokens_per_s=(prompt_tokens + output_tokens) / duration_s,
        mean_concurrency=sum(outcome.e2e_s for outcome in outcomes) / duration_s,
        peak_concurrency=peak_concurrency(outcomes),
        goodput_requests_per_s=met,
        ttft_ms=summarize((outcome.ttft_s for outcome in good), 1e3),
        itl_ms=summarize(chain.from_iterable(outcome.itl_s for outcome in good), 1e3),
        tpot_ms=summarize((tpot for outcome in good if (tpot := outcome.tpot_s) is not None), 1e3),
        e2e_ms=summarize((outcome.e2e_s for outcome in good), 1e3),
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error is not None)),
    )


def peak_concurrency(outcomes: Iterable[Outcome]) -> int:
    """Return the maximum number of requests that ran at the same time."""
    edges = chain.from_iterable(
        ((outcome.started_s, 1), (outcome.started_s + outcome.e2e_s, -1)) for outcome in outcomes
    )
    peak = running = 0
    for _, change in sorted(edges):  # at equal times, ends sort before starts
        running += change
        peak = max(peak, running)
    return peak


_OBJECTIVES = ("ttft", "tpot", "e2e")


def parse_objectives(pairs: Iterable[str]) -> dict[str, float]:
    """Convert `["ttft:500", "tpot:50"]` to {"ttft": 0.5, "tpot": 0.05}, in seconds.

    Raises `ConfigurationError` for an unknown metric or an invalid number.
    """
    objectives: dict[str, float] = {}
    for pair in pairs:
        name, _, value = pair.partition(":")
        name = "e2e" if name == "e2el" else name
        try:
            limit_ms = float(value)
        except ValueError:
            limit_ms = math.nan
        if name not in _OBJECTIVES or not limit_ms >= 0:
            raise ConfigurationError(
                f"--goodput {pair} is not one of {', '.join(_OBJECTIVES)} with milliseconds, as in ttft:500."
            )
        objectives[name] = limit_ms / 1e3
    return objectives


def meets(outcome: Outcome, objectives: Mapping[str, float]) -> bool:
    """Whether a request succeeded and met every objective. An output of one token has no TPOT and meets any limit."""
    if outcome.error is not None:
        return False
    seen = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s or 0.0, "e2e": outcome.e2e_s}
    return all(seen[name] <= limit_s for name, limit_s in objectives.items())
