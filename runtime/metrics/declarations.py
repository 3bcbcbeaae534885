"""All metrics: name, kind, labels, meaning, and the code that observes each.

Metrics named `sglang:` and `vllm:` have the names that dashboards of these servers use; metrics named
`penstock:` are Penstock's own. Prometheus's client adds `_total` to the names of counters, and `_bucket`, `_sum` and
`_count` to the names of histograms.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]

MODEL = ("model_name",)
# Labels of a replica's metrics. With several replicas, the label `dp_rank` is added. Only rank 0 reports, because all
# ranks run the same steps.
REPLICA = ("model_name", "engine_type", "tp_rank", "pp_rank")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric. Every sample has the `labels`. `--tokenizer-metrics-...` options add labels to request metrics."""

    name: str
    kind: Kind
    help: str
    observed: str  # the code that updates the metric: module.name
    labels: tuple[str, ...] = MODEL
    per_request: bool = False  # whether samples also have the labels from a request's header


_SCRAPE = "actors.scrape"
_STEP = "metrics.series.ReplicaSeries"
_REQUEST = "metrics.series.RequestSeries"
_SENT = "actors.request_observers.RequestMetrics.sent"
_ENDED = "actors.request_observers.RequestMetrics.ended"
_ENGINE = "metrics.series.EngineMetrics"
_replica_metric = partial(Metric, observed=_SCRAPE, labels=REPLICA)
_request_metric = partial(Metric, observed=f"{_REQUEST}.ended", per_request=True)

METRICS: tuple[Metric, ...] = (
    # --- replicas ---
    _replica_metric("sglang:num_running_reqs", "gauge", "Sequences that are being computed."),
    _replica_metric("sglang:num_queue_reqs", "gauge", "Sequences that wait for room in a batch."),
    _replica_metric("sglang:num_grammar_queue_reqs", "gauge", "Sequences that wait for data of their grammar."),
    _replica_metric("sglang:num_used_tokens", "gauge", "Tokens of KV cache that sequences hold."),
    _replica_metric("sglang:token_usage", "gauge", "Share of the KV cache that sequences hold."),
    _replica_metric(
        "sglang:swa_token_usage",
        "gauge",
        "Share of the separate pool of sliding-window layers that sequences hold; 0 without such a pool.",
    ),
    _replica_metric(
        "sglang:gen_throughput",
        "gauge",
        "Output tokens per second over the last log interval; 0 while nothing runs.",
    ),
    _replica_metric(
        "sglang:cache_hit_rate",
        "gauge",
        "Share of the prompt tokens of the last step with prompts that the prefix cache had.",
        observed=f"{_STEP}.launched",
    ),
    _replica_metric("sglang:total_retracted_reqs", "gauge", "Retractions since the start."),
    _replica_metric("sglang:max_total_num_tokens", "gauge", "Tokens that the KV cache holds."),
    _replica_metric("sglang:page_size", "gauge", "Tokens in one page."),
    _replica_metric("sglang:num_pages", "gauge", "Pages of the KV cache."),
    _replica_metric("sglang:context_len", "gauge", "Longest prompt and output together, in tokens."),
    _replica_metric("sglang:new_token_ratio", "gauge", "Share of the remaining output that admission reserves."),
    _replica_metric("sglang:kv_used_tokens", "gauge", "Tokens of KV cache that sequences hold."),
    _replica_metric("sglang:kv_available_tokens", "gauge", "Tokens of KV cache that are free."),
    _replica_metric("sglang:kv_evictable_tokens", "gauge", "Tokens of KV cache that are kept for their prefix."),
    _replica_metric(
        "sglang:realtime_tokens",
        "counter",
        "Tokens, counted as steps compute them; mode is prefill_compute, prefill_cache or decode.",
        observed=f"{_STEP}.launched, {_SCRAPE}",
        labels=(*REPLICA, "mode"),
    ),
    _replica_metric(
        "sglang:queue_time_s",
        "histogram",
        "Seconds from a request's entry into the queue to its first step.",
        observed=f"{_STEP}.launched",
    ),
    _replica_metric(
        "sglang:spec_accept_length",
        "gauge",
        "Mean number of tokens that a row with draft tokens yields: the accepted ones and one more.",
    ),
    _replica_metric("sglang:spec_accept_rate", "gauge", "Share of the drafts that the model accepted."),
    _replica_metric("vllm:spec_decode_num_drafts", "counter", "Rows with drafts that steps verified."),
    _replica_metric("vllm:spec_decode_num_draft_tokens", "counter", "Drafts that steps verified."),
    _replica_metric("vllm:spec_decode_num_accepted_tokens", "counter", "Drafts that the model accepted."),
    _replica_metric(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "counter",
        "Drafts that the model accepted, by their position in the row, from 0 on.",
        labels=(*REPLICA, "position"),
    ),
    _replica_metric("sglang:lora_pool_slots_used", "gauge", "Slots with LoRA adapters of running sequences."),
    _replica_metric("sglang:lora_pool_slots_total", "gauge", "Slots for LoRA adapters (--max-loras-per-batch)."),
    _replica_metric("penstock:adapter_slot_evictions", "counter", "LoRA adapters evicted from their slot."),
    _replica_metric("penstock:steps", "counter", "Steps since the start."),
    _replica_metric(
        "penstock:forced_tokens", "counter", "Tokens that grammars forced and that took no step of their own."
    ),
    _replica_metric(
        "penstock:recomputed_tokens",
        "counter",
        "Tokens that were computed again after their request was retracted.",
    ),
    _replica_metric(
        "penstock:swapped_out_pages",
        "counter",
        "Pages of retracted requests that were copied to host memory.",
    ),
    _replica_metric("penstock:swapped_in_pages", "counter", "Pages copied back to the device."),
    _replica_metric("sglang:hicache_host_used_tokens", "gauge", "Tokens of prefixes in the host tier."),
    _replica_metric("sglang:hicache_host_total_tokens", "gauge", "Tokens that fit into the host tier."),
    _replica_metric("penstock:host_written_pages", "counter", "Pages of prefixes copied to the host tier."),
    _replica_metric("penstock:host_restored_pages", "counter", "Pages of prefixes copied back from the host tier."),
    _replica_metric("penstock:host_evicted_pages", "counter", "Pages evicted from the host tier."),
    _replica_metric("penstock:storage_saved_pages", "counter", "Pages written to storage."),
    _replica_metric("penstock:storage_loaded_pages", "counter", "Pages read from storage and verified."),
    _replica_metric("penstock:storage_missed_pages", "counter", "Pages that were looked up in storage and not found."),
    _replica_metric("penstock:storage_corrupt_pages", "counter", "Pages of storage whose checksum was wrong."),
    _replica_metric("penstock:storage_failed_pages", "counter", "Pages that could not be written to storage."),
    _replica_metric(
        "penstock:storage_slow_pages",
        "counter",
        "Stored pages that were computed instead of read, because computing is faster.",
    ),
    _replica_metric(
        "penstock:step_seconds",
        "histogram",
        (
            "Seconds of one step; kind is prefill, decode or mixed. The rate of its sum is the share of the time in "
            "which the model computes."
        ),
        observed=f"{_STEP}.applied",
        labels=(*REPLICA, "kind"),
    ),
    _replica_metric("penstock:step_rows", "histogram", "Sequences of one step.", observed=f"{_STEP}.applied"),
    _replica_metric(
        "penstock:queue_age_seconds",
        "gauge",
        "Seconds that the oldest request without a step has waited.",
    ),
    _replica_metric(
        "penstock:pages",
        "gauge",
        "Pages by owner: running (sequences), prefix (kept in the tree), free.",
        labels=(*REPLICA, "owner"),
    ),
    _replica_metric(
        "penstock:prefix_lookups",
        "counter",
        "Sequences looked up in the prefix cache when they entered a batch; result is hit or miss.",
        observed=f"{_STEP}.launched",
        labels=(*REPLICA, "result"),
    ),
    # --- requests ---
    _request_metric("sglang:prompt_tokens", "counter", "Prompt tokens of ended requests."),
    _request_metric("sglang:generation_tokens", "counter", "Output tokens of ended requests."),
    _request_metric("sglang:cached_tokens", "counter", "Prompt tokens of ended requests that the prefix cache had."),
    _request_metric("sglang:num_requests", "counter", "Requests that ended."),
    _request_metric("sglang:num_so_requests", "counter", "Requests with a grammar that ended."),
    _request_metric(
        "sglang:num_aborted_requests",
        "counter",
        "Requests that ended because the client disconnected or cancelled them.",
    ),
    _request_metric(
        "sglang:time_to_first_token_seconds",
        "histogram",
        "Seconds from a request's arrival to its first token.",
        observed=_SENT,
    ),
    _request_metric(
        "penstock:predicted_first_token_seconds",
        "histogram",
        "Predicted seconds from a request's arrival to its first token, for requests with a prediction.",
        observed=f"{_REQUEST}.predicted",
    ),
    _request_metric(
        "penstock:first_token_error_seconds",
        "histogram",
        "Absolute difference between the predicted and the measured time to the first token.",
        observed=f"{_REQUEST}.predicted",
    ),
    _request_metric(
        "sglang:inter_token_latency_seconds",
        "histogram",
        "Seconds between two tokens of one choice. Tokens of one step share the time of the step.",
        observed=_SENT,
    ),
    _request_metric(
        "sglang:e2e_request_latency_seconds",
        "histogram",
        "Seconds from a request's arrival to its last token.",
    ),
    _request_metric(
        "sglang:prompt_tokens_histogram",
        "histogram",
        "Prompt lengths in tokens; with --collect-tokens-histogram.",
    ),
    _request_metric(
        "sglang:generation_tokens_histogram",
        "histogram",
        "Output lengths in tokens; with --collect-tokens-histogram.",
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
        "Delay with which the event loop runs a timer.",
        "actors.loop_watch.watch_loop",
    ),
    Metric("penstock:tokenizer_seconds", "histogram", "Seconds to turn a request's text into tokens.", _ENDED),
    Metric(
        "penstock:rejected_requests",
        "counter",
        (
            "Requests that were not computed, or not to their end; reason is invalid, too_long, overloaded, closed or "
            "failed."
        ),
        f"{_ENGINE}.refused",
        (*MODEL, "reason"),
    ),
    Metric(
        "vllm:lora_requests_info",
        "gauge",
        "Time in seconds since 1970. Its labels list the adapters that requests use, and the slots.",
        _SCRAPE,
        (*MODEL, "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    ),
    Metric("penstock:images", "counter", "Images of admitted requests.", _SCRAPE),
    Metric("penstock:image_encoder_seconds", "counter", "Time in the image encoder.", _SCRAPE),
    Metric("penstock:image_cache_hits", "counter", "Images whose vectors were cached (--mm-cache-gib).", _SCRAPE),
    Metric("penstock:image_cache_misses", "counter", "Images that were processed and encoded.", _SCRAPE),
    Metric("penstock:image_cache_bytes", "gauge", "Bytes of cached vectors of images.", _SCRAPE),
    Metric("penstock:loaded_adapters", "gauge", "LoRA adapters in host memory.", _SCRAPE),
    Metric("penstock:adapter_evictions", "counter", "LoRA adapters evicted from host memory.", _SCRAPE),
    Metric(
        "penstock:adapter_load_seconds",
        "histogram",
        "Seconds to load a LoRA adapter into host memory.",
        "actors.adapters.AdapterRegistry",
    ),
    Metric(
        "penstock:adapter_requests",
        "counter",
        "Requests by LoRA adapter, for the 100 adapters with the most requests.",
        _SCRAPE,
        (*MODEL, "lora_name"),
    ),
    Metric("penstock:requests", "gauge", "Requests in the engine, waiting or running.", _SCRAPE),
    Metric(
        "penstock:http_requests",
        "counter",
        "HTTP requests by route and status code. For a stream, the status code is that of its start.",
        "serve.http.endpoint.Endpoint",
        (*MODEL, "endpoint", "status_code"),
    ),
)

BY_NAME = {metric.name: metric for metric in METRICS}
