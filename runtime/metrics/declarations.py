"""Every metric there is: its name, kind, labels, meaning, and where it is observed. One line of help for one line here.

Names that begin with `sglang:` are those of SGLang's dashboards, `penstock:` are ours. Prometheus's client adds
`_total` to the names of counters and `_bucket`, `_sum`, `_count` to those of histograms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]

MODEL = ("model_name",)
# Of one replica; `dp_rank` is there when there are several. The ranks of a replica run the same steps: rank 0 counts.
REPLICA = ("model_name", "engine_type", "tp_rank", "pp_rank")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. `labels` are those of every sample; `--tokenizer-metrics-...` may add to those of requests."""

    name: str
    kind: Kind
    help: str
    observed: str  # where: module.name
    labels: tuple[str, ...] = MODEL
    per_request: bool = False  # takes the labels that a request's header sets


_SCRAPE = "actors.scrape"
_STEP = "metrics.series.ReplicaSeries"
_REQUEST = "metrics.series.RequestSeries"
_SENT = "actors.request_observers.RequestMetrics.sent"
_ENDED = "actors.request_observers.RequestMetrics.ended"
_ENGINE = "metrics.series.EngineMetrics"

METRICS: tuple[Metric, ...] = (
    # --- replicas ---
    Metric("sglang:num_running_reqs", "gauge", "Sequences that are being computed.", _SCRAPE, REPLICA),
    Metric("sglang:num_queue_reqs", "gauge", "Sequences that wait for room in a batch.", _SCRAPE, REPLICA),
    Metric(
        "sglang:num_grammar_queue_reqs",
        "gauge",
        "Sequences that wait for data of their grammar.",
        _SCRAPE,
        REPLICA,
    ),
    Metric("sglang:num_used_tokens", "gauge", "Tokens of KV cache that sequences hold.", _SCRAPE, REPLICA),
    Metric("sglang:token_usage", "gauge", "Share of the KV cache that sequences hold.", _SCRAPE, REPLICA),
    Metric(
        "sglang:gen_throughput",
        "gauge",
        "Output tokens per second over the last log interval; 0 while nothing runs.",
        _SCRAPE,
        REPLICA,
    ),
    Metric(
        "sglang:cache_hit_rate",
        "gauge",
        "Share of the prompt tokens of the last step with prompts that the prefix cache had.",
        f"{_STEP}.launched",
        REPLICA,
    ),
    Metric("sglang:total_retracted_reqs", "gauge", "Retractions since the start.", _SCRAPE, REPLICA),
    Metric("sglang:max_total_num_tokens", "gauge", "Tokens that the KV cache holds.", _SCRAPE, REPLICA),
    Metric("sglang:page_size", "gauge", "Tokens in one page.", _SCRAPE, REPLICA),
    Metric("sglang:num_pages", "gauge", "Pages of the KV cache.", _SCRAPE, REPLICA),
    Metric("sglang:context_len", "gauge", "Longest prompt and output together, in tokens.", _SCRAPE, REPLICA),
    Metric(
        "sglang:new_token_ratio",
        "gauge",
        "Share of the remaining output that admission reserves.",
        _SCRAPE,
        REPLICA,
    ),
    Metric("sglang:kv_used_tokens", "gauge", "Tokens of KV cache that sequences hold.", _SCRAPE, REPLICA),
    Metric("sglang:kv_available_tokens", "gauge", "Tokens of KV cache that are free.", _SCRAPE, REPLICA),
    Metric(
        "sglang:kv_evictable_tokens",
        "gauge",
        "Tokens of KV cache that are kept for their prefix.",
        _SCRAPE,
        REPLICA,
    ),
    Metric(
        "sglang:realtime_tokens",
        "counter",
        "Tokens, counted as steps compute them; mode is prefill_compute, prefill_cache or decode.",
        f"{_STEP}.launched, {_SCRAPE}",
        (*REPLICA, "mode"),
    ),
    Metric(
        "sglang:queue_time_s",
        "histogram",
        "Seconds from a request's entry into the queue to its first step.",
        f"{_STEP}.launched",
        REPLICA,
    ),
    Metric("penstock:steps", "counter", "Steps since the start.", _SCRAPE, REPLICA),
    Metric(
        "penstock:forced_tokens",
        "counter",
        "Tokens that grammars forced and that took no step of their own.",
        _SCRAPE,
        REPLICA,
    ),
    Metric(
        "penstock:step_seconds",
        "histogram",
        "Seconds of one step; kind is prefill, decode or mixed. The rate of its sum is the share of the time in "
        "which the model computes.",
        f"{_STEP}.applied",
        (*REPLICA, "kind"),
    ),
    Metric(
        "penstock:step_rows",
        "histogram",
        "Sequences of one step.",
        f"{_STEP}.applied",
        REPLICA,
    ),
    Metric(
        "penstock:queue_age_seconds",
        "gauge",
        "How long the oldest request that has not been in a step waits.",
        _SCRAPE,
        REPLICA,
    ),
    Metric(
        "penstock:pages",
        "gauge",
        "Pages by owner: running (sequences), prefix (kept in the tree), free.",
        _SCRAPE,
        (*REPLICA, "owner"),
    ),
    Metric(
        "penstock:prefix_lookups",
        "counter",
        "Sequences looked up in the prefix cache when they entered a batch; result is hit or miss.",
        f"{_STEP}.launched",
        (*REPLICA, "result"),
    ),
    # --- requests ---
    Metric(
        "sglang:prompt_tokens",
        "counter",
        "Prompt tokens of ended requests.",
        f"{_REQUEST}.ended",
        per_request=True,
    ),
    Metric(
        "sglang:generation_tokens",
        "counter",
        "Output tokens of ended requests.",
        f"{_REQUEST}.ended",
        per_request=True,
    ),
    Metric(
        "sglang:cached_tokens",
        "counter",
        "Prompt tokens of ended requests that the prefix cache had.",
        f"{_REQUEST}.ended",
        per_request=True,
    ),
    Metric("sglang:num_requests", "counter", "Requests that ended.", f"{_REQUEST}.ended", per_request=True),
    Metric(
        "sglang:num_so_requests",
        "counter",
        "Requests with a grammar that ended.",
        f"{_REQUEST}.ended",
        per_request=True,
    ),
    Metric(
        "sglang:num_aborted_requests",
        "counter",
        "Requests that their sender gave up.",
        f"{_REQUEST}.ended",
        per_request=True,
    ),
    Metric(
        "sglang:time_to_first_token_seconds",
        "histogram",
        "Seconds from a request's arrival to its first token.",
        _SENT,
        per_request=True,
    ),
    Metric(
        "sglang:inter_token_latency_seconds",
        "histogram",
        "Seconds between two tokens of one choice; tokens that come together share their time.",
        _SENT,
        per_request=True,
    ),
    Metric(
        "sglang:e2e_request_latency_seconds",
        "histogram",
        "Seconds from a request's arrival to its last token.",
        f"{_REQUEST}.ended",
        per_request=True,
    ),
    Metric(
        "sglang:prompt_tokens_histogram",
        "histogram",
        "Prompt lengths in tokens; with --collect-tokens-histogram.",
        f"{_REQUEST}.ended",
        per_request=True,
    ),
    Metric(
        "sglang:generation_tokens_histogram",
        "histogram",
        "Output lengths in tokens; with --collect-tokens-histogram.",
        f"{_REQUEST}.ended",
        per_request=True,
    ),
    # --- the engine and its process ---
    Metric(
        "sglang:engine_startup_time",
        "gauge",
        "Seconds from the start of the engine until it was ready.",
        _SCRAPE,
    ),
    Metric(
        "penstock:event_loop_lag_seconds",
        "histogram",
        "How late the event loop wakes whom it promised to wake.",
        "actors.loop_watch.watch_loop",
    ),
    Metric(
        "penstock:tokenizer_seconds",
        "histogram",
        "Seconds to turn a request's text into tokens.",
        _ENDED,
    ),
    Metric(
        "penstock:rejected_requests",
        "counter",
        "Requests that were not computed, or not to their end; reason is invalid, too_long, overloaded, closed or "
        "failed.",
        f"{_ENGINE}.refused",
        (*MODEL, "reason"),
    ),
    Metric("penstock:requests", "gauge", "Requests in the engine, in whatever state.", _SCRAPE),
    Metric(
        "penstock:http_requests",
        "counter",
        "HTTP requests by path of the route and status of the answer; for a stream, of its beginning.",
        "serve.endpoint.Endpoint",
        (*MODEL, "endpoint", "status_code"),
    ),
)

BY_NAME = {metric.name: metric for metric in METRICS}

# Names of the original that have no meaning here yet, each with the reason.
ABSENT: dict[str, str] = {
    "sglang:spec_accept_length": "there is no speculative decoding",
    "sglang:num_prefill_prealloc_queue_reqs": "prompts and outputs are computed in one process",
    "sglang:num_prefill_inflight_queue_reqs": "prompts and outputs are computed in one process",
    "sglang:num_decode_prealloc_queue_reqs": "prompts and outputs are computed in one process",
    "sglang:num_decode_transfer_queue_reqs": "prompts and outputs are computed in one process",
    "sglang:num_bootstrap_failed_reqs": "prompts and outputs are computed in one process",
    "sglang:num_transfer_failed_reqs": "prompts and outputs are computed in one process",
    "sglang:kv_transfer_speed_gb_s": "prompts and outputs are computed in one process",
    "sglang:kv_transfer_latency_ms": "prompts and outputs are computed in one process",
    "sglang:swa_token_usage": "there is one KV pool for all layers",
    "sglang:num_running_reqs_offline_batch": "there are no offline batches",
    "sglang:time_to_first_token_seconds_offline_batch": "there are no offline batches",
    "sglang:num_retracted_reqs": "never set there; see sglang:total_retracted_reqs",
    "sglang:num_paused_reqs": "never set there",
    "sglang:utilization": "never set there; see penstock:step_seconds",
    "sglang:max_running_requests_under_SLO": "never set there",
    "sglang:engine_load_weights_time": "never set there; see sglang:engine_startup_time",
    "sglang:avg_request_queue_latency": "never set there; see sglang:queue_time_s",
    "sglang:num_grammar_cache_hit": "never set there",
    "sglang:num_grammar_aborted": "never set there",
    "sglang:num_grammar": "never set there; see sglang:num_so_requests",
    "sglang:grammar_compilation_time_seconds": "never set there",
    "sglang:grammar_schema_count": "never set there",
    "sglang:grammar_ebnf_size": "never set there",
    "sglang:grammar_tree_traversal_time_avg": "never set there",
    "sglang:grammar_tree_traversal_time_max": "never set there",
    "sglang:prefetched_tokens": "the KV cache has one level",
    "sglang:backuped_tokens": "the KV cache has one level",
    "sglang:prefetch_pgs": "the KV cache has one level",
    "sglang:backup_pgs": "the KV cache has one level",
    "sglang:prefetch_bandwidth": "the KV cache has one level",
    "sglang:backup_bandwidth": "the KV cache has one level",
    "sglang:func_latency_seconds": "it times functions of SGLang's processes; see penstock:step_seconds",
    "sglang:startup_latency_breakdown_seconds_max": "see sglang:engine_startup_time",
}
