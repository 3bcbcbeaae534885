from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ConfigurationError
from serve.bench.metrics import (
    Outcome,
    measure,
    meets,
    parse_objectives,
    peak_concurrency,
    percentile,
    summarize,
)

finite = st.floats(-1e6, 1e6)


def outcome(**changes: object) -> Outcome:
    values = {
        "started_s": 0.0,
        "e2e_s": 2.0,
        "prompt_tokens": 10,
        "ttft_s": 0.5,
        "decode_s": 1.0,
        "itl_s": (0.25, 0.25, 0.5),
        "output_tokens": 5,
    }
    return Outcome(**{**values, **changes})  # type: ignore[arg-type]


@given(st.lists(finite, min_size=1), st.floats(0, 100))
def test_percentile_is_numpys_linear_percentile(values: list[float], percent: float) -> None:
    assert percentile(sorted(values), percent) == pytest.approx(np.percentile(values, percent), abs=1e-6)


def test_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="empty sequence"):
        percentile([], 50)


def test_summary_scales_and_orders() -> None:
    summary = summarize([0.003, 0.001, 0.002], 1e3)
    assert summary is not None
    assert (summary.mean, summary.median, summary.min, summary.max) == pytest.approx((2, 2, 1, 3))
    assert summary.p90 == pytest.approx(2.8)


def test_summary_of_nothing_is_none() -> None:
    assert summarize([]) is None


def test_tpot_excludes_the_first_token() -> None:
    assert outcome().tpot_s == pytest.approx(0.25)


def test_one_output_token_has_no_tpot() -> None:
    assert outcome(output_tokens=1).tpot_s is None


def test_throughput_counts_only_what_succeeded() -> None:
    results = measure([outcome(), outcome(error="HTTP 500: no"), outcome(cached_tokens=4)], 4.0)
    assert (results.completed, results.failed) == (2, 1)
    assert (results.input_tokens, results.output_tokens, results.cached_tokens) == (20, 10, 4)
    assert results.requests_per_s == 0.5
    assert results.output_tokens_per_s == 2.5
    assert results.total_tokens_per_s == 7.5
    assert results.mean_concurrency == 1.5
    assert results.errors == {"HTTP 500: no": 1}


def test_latencies_are_milliseconds_of_the_good_requests() -> None:
    results = measure([outcome(), outcome(error="x", ttft_s=9.0)], 4.0)
    assert results.ttft_ms is not None
    assert results.itl_ms is not None
    assert results.ttft_ms.max == 500
    assert results.itl_ms.max == 500
    assert results.itl_ms.median == 250


def test_a_run_where_all_failed_has_no_latencies() -> None:
    results = measure([outcome(error="x")], 1.0)
    assert (results.ttft_ms, results.e2e_ms, results.cached_tokens) == (None, None, None)


def test_peak_concurrency_counts_overlaps_and_ends_before_starts() -> None:
    spans = [(0.0, 2.0), (1.0, 2.0), (2.0, 1.0), (2.5, 0.1)]
    assert peak_concurrency(outcome(started_s=start, e2e_s=span) for start, span in spans) == 3
    assert peak_concurrency(outcome(started_s=float(n), e2e_s=1.0) for n in range(5)) == 1


def test_goodput_needs_every_objective() -> None:
    met, slow_first, slow_rest = outcome(), outcome(ttft_s=0.51), outcome(decode_s=1.3)
    objectives = parse_objectives(["ttft:500", "tpot:300"])
    results = measure([met, slow_first, slow_rest], 2.0, objectives)
    assert results.goodput_requests_per_s == 0.5
    assert measure([met], 2.0).goodput_requests_per_s is None


def test_failed_requests_meet_no_objective() -> None:
    assert not meets(outcome(error="x"), {"ttft": 10.0})


def test_objectives_are_read_as_milliseconds() -> None:
    assert parse_objectives(["ttft:500", "e2el:2000"]) == {"ttft": 0.5, "e2e": 2.0}


@pytest.mark.parametrize("pair", ["ttft", "ttft:", "ttft:fast", "itl:5", "tpot:-1", "tpot:nan"])
def test_unusable_objectives_are_refused(pair: str) -> None:
    with pytest.raises(ConfigurationError, match="--goodput"):
        parse_objectives([pair])
