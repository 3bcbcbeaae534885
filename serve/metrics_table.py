"""The declarations of the metrics as text for people: docs/monitoring/metrics.md."""

from __future__ import annotations

from runtime.metrics.declarations import ABSENT, METRICS, MODEL, REPLICA, Metric

_DOCUMENT = """\
# Metrics

Every metric of `/metrics` (`--enable-metrics`), written by `python -m serve explain --table metrics`. Names that begin
with `sglang:` are those that SGLang's dashboards ask for, those with `penstock:` are ours; beside them stand
`process_*` of prometheus-client. A counter's name gets `_total`, a histogram's samples get `_bucket`, `_sum` and
`_count`.

*model* stands for the label `model_name`; *replica* for `model_name`, `engine_type`, `tp_rank`, `pp_rank` and, with
`--dp-size` above 1, `dp_rank`; *request* for `model_name` and those of `--tokenizer-metrics-allowed-customer-labels`.
"""
_ABSENT = """\
Names of SGLang 0.5.2 that are not served, and why:

| name | why |
|---|---|
"""


def metrics_markdown() -> str:
    """The whole of docs/monitoring/metrics.md."""
    lines = ["| name | kind | labels | what it is | observed in |", "|---|---|---|---|---|"]
    lines += [
        f"| `{metric.name}` | {metric.kind} | {_labels(metric)} | {metric.help} | `{metric.observed}` |"
        for metric in METRICS
    ]
    absent = [f"| `{name}` | {reason} |" for name, reason in ABSENT.items()]
    return "\n".join([_DOCUMENT, *lines, "", _ABSENT + "\n".join(absent), ""])


def _labels(metric: Metric) -> str:
    if metric.per_request:
        return "request"
    of_replica = metric.labels[: len(REPLICA)] == REPLICA
    more = metric.labels[len(REPLICA if of_replica else MODEL) :]
    return ", ".join(["replica" if of_replica else "model", *(f"`{label}`" for label in more)])
