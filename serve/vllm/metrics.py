"""The engine's metrics as the objects that vLLM's `LLM.get_metrics` returns."""

from __future__ import annotations

from dataclasses import dataclass

from runtime.errors import InvalidRequest, NotFound
from serve.python.sync_engine import SyncEngine


@dataclass(slots=True)
class Metric:
    """One metric. `name` is its name in Prometheus, without "_total". `docs/monitoring/metrics.md` lists all names."""

    name: str
    labels: dict[str, str]


@dataclass(slots=True)
class Counter(Metric):
    """A number that never decreases."""

    value: float


@dataclass(slots=True)
class Gauge(Metric):
    """A number that may increase and decrease."""

    value: float


@dataclass(slots=True)
class Vector(Metric):
    """Counters of draft tokens: one number, which never decreases, for each position in the draft."""

    values: list[float]


@dataclass(slots=True)
class Histogram(Metric):
    """The count and the sum of observed values. `buckets` maps an upper bound to the number of values up to it."""

    count: int
    sum: float
    buckets: dict[str, int]


def read_metrics(engine: SyncEngine) -> list[Metric]:
    """Return all metrics. Raises `InvalidRequest` if the engine was started without metrics."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        text = engine.metrics()
    except NotFound:
        raise InvalidRequest("get_metrics needs LLM(..., disable_log_stats=False).") from None
    found: list[Metric] = []
    for family in text_string_to_metric_families(text):
        if family.type == "histogram":
            found += _histograms(family.name, family.samples)
        elif family.type == "counter" and family.name.endswith("_per_pos"):
            found += _vectors(family.name, family.samples)
        elif family.type == "counter":
            found += [Counter(family.name, each.labels, each.value) for each in family.samples]
        elif family.type == "gauge":
            found += [Gauge(each.name, each.labels, each.value) for each in family.samples]
    return found


def _vectors(name: str, samples: list) -> list[Metric]:  # pyright: ignore[reportMissingTypeArgument, reportUnknownParameterType]
    """Return one vector for each group of samples whose labels differ only in `position`."""
    by_labels: dict[tuple[tuple[str, str], ...], dict[int, float]] = {}
    for each in samples:
        labels = {key: value for key, value in each.labels.items() if key != "position"}
        by_labels.setdefault(tuple(labels.items()), {})[int(each.labels["position"])] = each.value
    return [
        Vector(name, dict(labels), [values[position] for position in sorted(values)])
        for labels, values in by_labels.items()
    ]


def _histograms(name: str, samples: list) -> list[Metric]:  # pyright: ignore[reportMissingTypeArgument, reportUnknownParameterType]
    by_labels: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for each in samples:
        labels = {key: value for key, value in each.labels.items() if key != "le"}
        made = by_labels.setdefault(tuple(labels.items()), Histogram(name, labels, 0, 0.0, {}))
        if each.name.endswith("_bucket"):
            made.buckets[each.labels["le"]] = int(each.value)
        elif each.name.endswith("_count"):
            made.count = int(each.value)
        elif each.name.endswith("_sum"):
            made.sum = each.value
    return [*by_labels.values()]
