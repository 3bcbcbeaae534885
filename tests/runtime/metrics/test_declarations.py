"""Every metric is declared once, and every metric of SGLang is served or has a reason for its absence."""

from __future__ import annotations

import importlib
import re

import pytest

from bench.documents import ABSENT_METRICS
from runtime.metrics.declarations import BY_NAME, METRICS, Metric

NAMES = {
    "gauge": """
        num_running_reqs num_used_tokens token_usage gen_throughput num_queue_reqs
        num_grammar_queue_reqs cache_hit_rate spec_accept_length total_retracted_reqs
        num_prefill_prealloc_queue_reqs num_prefill_inflight_queue_reqs
        num_decode_prealloc_queue_reqs num_decode_transfer_queue_reqs swa_token_usage
        num_running_reqs_offline_batch kv_transfer_speed_gb_s kv_transfer_latency_ms
        num_retracted_reqs num_paused_reqs utilization max_running_requests_under_SLO
        engine_startup_time engine_load_weights_time avg_request_queue_latency
        startup_latency_breakdown_seconds_max
    """,
    "counter": """
        num_bootstrap_failed_reqs num_transfer_failed_reqs num_grammar_cache_hit num_grammar_aborted
        num_grammar prompt_tokens generation_tokens cached_tokens num_requests num_so_requests
        num_aborted_requests prefetched_tokens backuped_tokens
    """,
    "histogram": """
        queue_time_s grammar_compilation_time_seconds grammar_schema_count grammar_ebnf_size
        grammar_tree_traversal_time_avg grammar_tree_traversal_time_max time_to_first_token_seconds
        time_to_first_token_seconds_offline_batch inter_token_latency_seconds
        e2e_request_latency_seconds prompt_tokens_histogram generation_tokens_histogram prefetch_pgs
        backup_pgs prefetch_bandwidth backup_bandwidth func_latency_seconds
    """,
}
KINDS = {f"sglang:{name}": kind for kind, names in NAMES.items() for name in names.split()}


def test_every_name_of_the_original_is_served_or_absent_for_a_reason() -> None:
    assert len(KINDS) == 55
    assert set(KINDS) - set(BY_NAME) == set(ABSENT_METRICS)
    assert not set(ABSENT_METRICS) & set(BY_NAME)
    assert all(reason and not reason.endswith(".") for reason in ABSENT_METRICS.values())


def test_what_is_served_is_of_the_kind_of_the_original() -> None:
    kinds = {name: BY_NAME[name].kind for name in KINDS if name in BY_NAME}
    assert kinds == {name: KINDS[name] for name in kinds}


def test_names_are_ours_or_the_original_s_and_unique() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"(sglang|vllm|penstock):[a-z0-9_]+", metric.name), metric.name
        assert metric.kind != "counter" or not metric.name.endswith("_total"), metric.name
        assert metric.help[0].isupper(), metric.name
        assert metric.help.endswith("."), metric.name


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_where_it_is_observed_exists(metric: Metric) -> None:
    for place in metric.observed.split(", "):
        parts = place.split(".")
        split = next(at for at, part in enumerate([*parts, "A"]) if part[0].isupper() or part == "watch_loop")
        prefix = "" if parts[0] == "serve" else "runtime."
        found = importlib.import_module(prefix + ".".join(parts[:split]))
        for part in parts[split:]:
            found = getattr(found, part)
