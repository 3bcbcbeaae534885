"""The metrics of an engine for Prometheus. Each engine has its own registry.

Gauges are read from the engine during the scrape, so they are current and cost nothing between scrapes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from runtime.errors import NotFound
from runtime.media.preparation import MediaPreparer
from runtime.metrics.declarations import METRICS, Metric
from runtime.metrics.series import EngineMetrics, Histogram, ReplicaSeries, RequestSeries

if TYPE_CHECKING:
    from prometheus_client.core import Metric as Family
    from prometheus_client.registry import CollectorRegistry

    from runtime.actors.engine_core import EngineCore
    from runtime.actors.scheduler import SchedulerActor

Labels = Mapping[str, str]


class Sample(NamedTuple):
    """One value, or one histogram, of a metric."""

    name: str
    labels: Labels
    value: float | Histogram


class EngineCollector:
    """The prometheus-client collector of one engine."""

    def __init__(self, core: EngineCore, metrics: EngineMetrics) -> None:
        self._core = core
        self._metrics = metrics

    def collect(self) -> Iterator[Family]:
        """Yield every metric that has samples, in the order of `METRICS`."""
        by_name: dict[str, list[Sample]] = {}
        for sample in samples(self._core, self._metrics):
            by_name.setdefault(sample.name, []).append(sample)
        for metric in METRICS:
            if metric.name in by_name:
                yield _family(metric, by_name[metric.name])


def exposition(core: EngineCore) -> bytes:
    """Return the current metrics in Prometheus's text format. Raises `NotFound` if metrics are off.

    Must be called on the engine's event loop. The OpenMetrics format is not offered: prometheus-client replaces the
    colons in its metric names, and dashboards need the names with colons.
    """
    from prometheus_client.exposition import generate_latest

    return generate_latest(registry(core))


def registry(core: EngineCore) -> CollectorRegistry:
    """Return a registry with the metrics of this engine and of its process (memory, CPU).

    Raises `NotFound` if metrics are off.
    """
    from prometheus_client import CollectorRegistry
    from prometheus_client.process_collector import ProcessCollector

    if core.metrics is None:
        raise NotFound("Metrics are off: start the server with --enable-metrics (enable_metrics=True).")
    collectors = CollectorRegistry()
    collectors.register(EngineCollector(core, core.metrics))
    ProcessCollector(registry=collectors)
    return collectors


def samples(core: EngineCore, metrics: EngineMetrics) -> Iterator[Sample]:
    """Yield all current samples."""
    model = {"model_name": core.plan.serve.served_model_name}
    for scheduler in core.schedulers:
        yield from _replica(core, scheduler, metrics.replicas[scheduler.index], model)
    for values, series in metrics.requests.items():
        yield from _requests(series, {**model, **dict(zip(metrics.plan.request_labels, values))})
    yield Sample("sglang:engine_startup_time", model, metrics.startup_s)
    yield Sample("penstock:event_loop_lag_seconds", model, metrics.loop_lag_s)
    yield Sample("penstock:tokenizer_seconds", model, metrics.tokenizer_s)
    yield Sample("penstock:requests", model, core.status().num_requests)
    yield from _adapters(core, model)
    if core.media is not None:
        yield from _media(core.media, model)
    for reason, count in metrics.rejected.items():
        yield Sample("penstock:rejected_requests", {**model, "reason": reason}, count)
    for (path, status), count in metrics.http.items():
        labels = {**model, "endpoint": path, "status_code": str(status)}
        yield Sample("penstock:http_requests", labels, count)


def _replica(core: EngineCore, actor: SchedulerActor, series: ReplicaSeries, model: Labels) -> Iterator[Sample]:
    labels = {**model, "engine_type": "unified", "tp_rank": "0", "pp_rank": "0"}
    if core.plan.parallel.dp_size > 1:
        labels["dp_rank"] = str(actor.index)
    load = actor.scheduler.load
    page_size = core.plan.cache.page_size
    num_free = load.num_pages - load.num_used_pages - load.num_evictable_pages
    gauges = {
        "sglang:num_running_reqs": load.num_running,
        "sglang:num_queue_reqs": load.num_waiting,
        "sglang:num_grammar_queue_reqs": len(actor.scheduler.awaited),
        "sglang:num_used_tokens": load.num_used_tokens,
        "sglang:token_usage": round(load.token_usage, 4),
        "sglang:swa_token_usage": round(load.window_usage, 4),
        "sglang:gen_throughput": actor.progress.gen_throughput if load.num_running else 0.0,
        "sglang:cache_hit_rate": series.hit_rate,
        "sglang:total_retracted_reqs": load.num_retracted,
        "sglang:max_total_num_tokens": load.num_pages * page_size,
        "sglang:page_size": page_size,
        "sglang:num_pages": load.num_pages,
        "sglang:context_len": core.plan.model.context_length,
        "sglang:new_token_ratio": load.new_token_ratio,
        "sglang:kv_used_tokens": load.num_used_tokens,
        "sglang:kv_available_tokens": num_free * page_size,
        "sglang:kv_evictable_tokens": load.num_evictable_pages * page_size,
        "sglang:spec_accept_length": load.drafts.accept_length,
        "sglang:spec_accept_rate": load.drafts.accept_rate,
        "vllm:spec_decode_num_drafts": load.drafts.verified,
        "vllm:spec_decode_num_draft_tokens": load.drafts.proposed,
        "vllm:spec_decode_num_accepted_tokens": load.drafts.accepted,
        "sglang:lora_pool_slots_used": load.num_adapter_slots,
        "sglang:lora_pool_slots_total": core.plan.scheduler.adapter_slots if core.adapters.enabled else 0,
        "penstock:adapter_slot_evictions": load.num_adapter_evictions,
        "penstock:steps": series.num_steps,
        "penstock:forced_tokens": load.num_forced,
        "penstock:recomputed_tokens": load.num_recomputed,
        "penstock:swapped_out_pages": load.num_swapped_out,
        "penstock:swapped_in_pages": load.num_swapped_in,
        "sglang:hicache_host_used_tokens": load.tier.num_used * page_size,
        "sglang:hicache_host_total_tokens": load.tier.num_pages * page_size,
        "penstock:host_written_pages": load.tier.num_written,
        "penstock:host_restored_pages": load.tier.num_restored,
        "penstock:host_evicted_pages": load.tier.num_evicted,
        "penstock:storage_saved_pages": load.storage.num_saved,
        "penstock:storage_loaded_pages": load.storage.num_loaded,
        "penstock:storage_missed_pages": load.storage.num_missed,
        "penstock:storage_corrupt_pages": load.storage.num_corrupt,
        "penstock:storage_failed_pages": load.storage.num_failed,
        "penstock:storage_slow_pages": load.storage.num_too_slow,
        "penstock:queue_age_seconds": core.oldest_waiting_s(actor),
        "sglang:queue_time_s": series.queue_s,
        "penstock:step_rows": series.step_rows,
    }
    for name, value in gauges.items():
        yield Sample(name, labels, value)
    pages = {"running": load.num_used_pages, "prefix": load.num_evictable_pages, "free": num_free}
    yield from _by("penstock:pages", labels, "owner", pages)
    tokens = {
        "prefill_compute": series.prompt_tokens,
        "prefill_cache": series.cached_tokens,
        "decode": series.generated_tokens,
    }
    yield from _by("sglang:realtime_tokens", labels, "mode", tokens)
    # The count of position p (from 0) is the number of rows that accepted more than p draft tokens.
    histogram = load.drafts.histogram
    accepted = {str(position): sum(histogram[position + 1 :]) for position in range(max(len(histogram) - 1, 1))}
    yield from _by("vllm:spec_decode_num_accepted_tokens_per_pos", labels, "position", accepted)
    yield from _by("penstock:prefix_lookups", labels, "result", series.lookups)
    yield from _by("penstock:step_seconds", labels, "kind", series.step_s)


def _adapters(core: EngineCore, model: Labels) -> Iterator[Sample]:
    registry = core.adapters
    names = {"running_lora_adapters": ",".join(registry.in_use), "waiting_lora_adapters": ""}
    slots = core.plan.scheduler.adapter_slots if registry.enabled else 0
    yield Sample("vllm:lora_requests_info", {**model, "max_lora": str(slots), **names}, time.time())
    yield Sample("penstock:loaded_adapters", model, registry.num_resident)
    yield Sample("penstock:adapter_evictions", model, registry.num_evictions)
    yield Sample("penstock:adapter_load_seconds", model, registry.load_s)
    yield from _by("penstock:adapter_requests", model, "lora_name", registry.num_requests)


def _media(media: MediaPreparer, model: Labels) -> Iterator[Sample]:
    yield Sample("penstock:images", model, media.num_images)
    yield Sample("penstock:image_encoder_seconds", model, media.encode_s)
    yield Sample("penstock:image_cache_hits", model, media.cache.num_hits)
    yield Sample("penstock:image_cache_misses", model, media.cache.num_misses)
    yield Sample("penstock:image_cache_bytes", model, media.cache.num_bytes)


def _by(
    name: str, labels: Labels, label: str, values: Mapping[str, float] | Mapping[str, Histogram]
) -> Iterator[Sample]:
    for key, value in values.items():
        yield Sample(name, {**labels, label: key}, value)


def _requests(series: RequestSeries, labels: Labels) -> Iterator[Sample]:
    values: dict[str, float | Histogram | None] = {
        "sglang:prompt_tokens": series.prompt_tokens,
        "sglang:generation_tokens": series.output_tokens,
        "sglang:cached_tokens": series.cached_tokens,
        "sglang:num_requests": series.num_requests,
        "sglang:num_so_requests": series.num_with_grammar,
        "sglang:num_aborted_requests": series.num_aborted,
        "sglang:time_to_first_token_seconds": series.first_token_s,
        "penstock:predicted_first_token_seconds": series.predicted_first_token_s,
        "penstock:first_token_error_seconds": series.prediction_error_s,
        "sglang:inter_token_latency_seconds": series.between_tokens_s,
        "sglang:e2e_request_latency_seconds": series.whole_s,
        "sglang:prompt_tokens_histogram": series.prompt_lengths,
        "sglang:generation_tokens_histogram": series.output_lengths,
    }
    for name, value in values.items():
        if value is not None:
            yield Sample(name, labels, value)


def _family(metric: Metric, samples: Sequence[Sample]) -> Family:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.utils import floatToGoString

    names = list(samples[0].labels)
    if metric.kind == "histogram":
        histograms = HistogramMetricFamily(metric.name, metric.help, labels=names)
        for sample in samples:
            if isinstance(sample.value, Histogram):
                bounds = [*map(floatToGoString, sample.value.bounds), "+Inf"]
                buckets = list(zip(bounds, sample.value.cumulative()))
                histograms.add_metric(list(sample.labels.values()), buckets, sample.value.sum)
        return histograms
    family = (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
        metric.name, metric.help, labels=names
    )
    for sample in samples:
        if not isinstance(sample.value, Histogram):
            family.add_metric(list(sample.labels.values()), sample.value)
    return family
