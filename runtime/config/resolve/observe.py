"""The section of the plan about metrics, logs and traces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, get_type_hints

from runtime.config import buckets
from runtime.config.buckets import Bounds, ascending, token_bounds
from runtime.config.plan import KvEventsPlan, ObservePlan
from runtime.config.resolve.plan_builder import Decision, PlanBuilder
from runtime.errors import ConfigurationError

LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")  # a header's name: `token` in RFC 9110
_ENDPOINT = re.compile(r"tcp://[^\s]+:\d{1,5}|(ipc|inproc)://\S+", re.ASCII)
TAKEN_LABELS = frozenset({"model_name", "le"})


def observe_plan(builder: PlanBuilder) -> ObservePlan:
    """Plan metrics, logs and traces. They depend only on the options."""
    return builder.build(
        ObservePlan,
        ttft_bounds=_seconds(builder, "bucket_time_to_first_token", buckets.TIME_TO_FIRST_TOKEN),
        itl_bounds=_seconds(builder, "bucket_inter_token_latency", buckets.INTER_TOKEN_LATENCY),
        e2e_bounds=_seconds(builder, "bucket_e2e_request_latency", buckets.E2E_LATENCY),
        prompt_bounds=_lengths(builder, "prompt_tokens_buckets"),
        output_bounds=_lengths(builder, "generation_tokens_buckets"),
        labels_header=_labels_header(builder),
        request_labels=_request_labels(builder),
        request_log_level=_request_log_level(builder),
        trace_endpoint=_trace_endpoint(builder),
        kv_events=_kv_events(builder),
    )


def _kv_events(builder: PlanBuilder) -> Decision[KvEventsPlan | None]:
    option = "kv_events_config"
    given = dict(builder.args.observe.kv_events_config or {})
    publisher, enabled = given.pop("publisher", "null"), given.pop("enable_kv_cache_events", True)
    kinds = get_type_hints(KvEventsPlan)
    for name, value in given.items():
        if name not in kinds:
            builder.refuse(option, f"{_flag(option)}: {name!r} is unknown; supported fields: {', '.join(kinds)}.")
        elif not _is_of(value, kinds[name]):
            builder.refuse(option, f"{_flag(option)}: {name} cannot be {value!r}.")
    for name in ("endpoint", "replay_endpoint"):
        if (address := given.get(name)) is not None and not _ENDPOINT.fullmatch(str(address)):
            builder.refuse(option, f"{_flag(option)}: {name} must be like tcp://*:5557 or ipc:///run/kv.")
    if publisher not in ("null", "zmq") or not isinstance(enabled, bool):
        builder.refuse(option, f'{_flag(option)}: publisher must be "zmq" or "null".')
    if option in builder.refusals or publisher == "null" or not enabled:
        return Decision(None, "--kv-events-config does not enable events")
    if not builder.args.cache.disable_radix_cache:
        return Decision(KvEventsPlan(**given), "as asked")
    builder.refuse(option, f"{_flag(option)}: with --disable-radix-cache there are no events.")
    return Decision(None, "prefix caching is off")


def _is_of(value: object, kind: Any) -> bool:
    """Return whether a JSON value is valid for a field of this type: text, null if allowed, or a positive integer."""
    if kind is int:
        return type(value) is int and 0 < value < 2**31
    return isinstance(value, kind)


def _trace_endpoint(builder: PlanBuilder) -> Decision[str | None]:
    if not builder.args.observe.enable_trace:
        return Decision(None, "--enable-trace is not set")
    return builder.follow("oltp_traces_endpoint")


def _seconds(builder: PlanBuilder, option: str, default: Bounds) -> Decision[Bounds]:
    values: Sequence[float] | None = builder.args.get(option)
    if values is None:
        return Decision(default, "the default")
    try:
        return Decision(ascending(values), "as asked")
    except ConfigurationError as error:
        builder.refuse(option, f"{_flag(option)}: {error}")
        return Decision(default, "the requested value cannot be used")


def _lengths(builder: PlanBuilder, option: str) -> Decision[Bounds]:
    rule: Sequence[str] | None = builder.args.get(option)
    try:
        bounds = buckets.TOKENS if rule is None else token_bounds(rule)
    except ConfigurationError as error:
        builder.refuse(option, f"{_flag(option)}: {error}")
        return Decision((), "the requested value cannot be used")
    if not builder.args.observe.collect_tokens_histogram:
        return Decision((), "no histogram without --collect-tokens-histogram")
    return Decision(bounds, "the default" if rule is None else "as asked")


def _labels_header(builder: PlanBuilder) -> Decision[str]:
    name = builder.args.observe.tokenizer_metrics_custom_labels_header
    if not HEADER.fullmatch(name):
        option = "tokenizer_metrics_custom_labels_header"
        builder.refuse(option, f"{_flag(option)} {name!r} is not a valid header name.")
    return builder.follow("tokenizer_metrics_custom_labels_header", name.lower())


def _request_labels(builder: PlanBuilder) -> Decision[tuple[str, ...]]:
    option = "tokenizer_metrics_allowed_customer_labels"
    names = builder.args.observe.tokenizer_metrics_allowed_customer_labels or ()
    for name in names:
        if not LABEL.fullmatch(name) or name in TAKEN_LABELS or name.startswith("__") or names.count(name) > 1:
            builder.refuse(option, f"{_flag(option)}: {name!r} is not a valid label, or is listed twice.")
    return builder.follow(option, names)


def _request_log_level(builder: PlanBuilder) -> Decision[int | None]:
    if not builder.args.observe.log_requests:
        return Decision(None, "--log-requests is not set")
    return builder.follow("log_requests_level")


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")
