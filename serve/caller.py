"""What the headers of a request say about its sender."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING

import orjson

from runtime.request import NOBODY, Caller

if TYPE_CHECKING:
    from runtime.config.plan import ObservePlan

MAX_LABEL_CHARS = 128
MAX_TRACE_CHARS = 512  # what W3C wants carried on

# Of the request that the running task answers.
CALLER: ContextVar[Caller] = ContextVar("penstock_caller", default=NOBODY)


def caller_of(headers: Mapping[str, str], plan: ObservePlan) -> Caller:
    """The sender as the headers describe it. Labels that are not allowed, or no text, are left out."""
    trace = _trace(headers) if plan.trace_endpoint is not None else ()
    if not plan.request_labels:
        return Caller(trace=trace) if trace else NOBODY
    try:
        given = orjson.loads(headers.get(plan.labels_header) or "{}")
    except orjson.JSONDecodeError:
        given = {}
    if not isinstance(given, dict):
        given = {}
    values = (given.get(name, "") for name in plan.request_labels)
    labels = tuple(v[:MAX_LABEL_CHARS] if isinstance(v, str) else "" for v in values)
    return Caller(labels=labels, trace=trace)


def _trace(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The trace context, which says whose part the request is."""
    given = ((name, headers.get(name, "")) for name in ("traceparent", "tracestate"))
    return tuple((name, value) for name, value in given if 0 < len(value) <= MAX_TRACE_CHARS)
