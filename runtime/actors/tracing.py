"""OpenTelemetry traces: the waiting and computing times of each request, exported as spans over OTLP."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from runtime.actors.live_requests import LiveRequest
from runtime.errors import ConfigurationError, PenstockError

logger = logging.getLogger("penstock.core")

CLOSE_TIMEOUT_MS = 3000
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"


class RequestTraces:
    """A `RequestObserver` that exports the spans of a request when the request ends.

    The request's `traceparent` header names the parent span. OpenTelemetry sends the spans from a thread, and
    drops spans that it cannot send in time. Raises `ConfigurationError` if the OpenTelemetry packages are missing.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.sdk.resources import SERVICE_NAME, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

            exporter = _exporter(endpoint)
        except ImportError as error:
            raise ConfigurationError(
                f"--enable-trace needs OpenTelemetry ({error.name} is missing): pip install 'penstock[trace]'."
            ) from error
        name = os.environ.get("OTEL_SERVICE_NAME", "penstock")
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}), shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(exporter)
        self._provider.add_span_processor(self._processor)
        self._tracer = self._provider.get_tracer("penstock")
        self._propagator = TraceContextTextMapPropagator()

    def began(self, live: LiveRequest) -> None:
        """Do nothing: the spans are exported when the request ends."""

    def ended(self, live: LiveRequest, error: PenstockError | None) -> None:
        """Export the request's span. It has one child span for each phase reached: tokenize, queue, prefill, decode."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        times, now_s = live.times, time.monotonic()
        epoch_ns = time.time_ns() - int(now_s * 1e9)

        def at(monotonic_s: float) -> int:
            return epoch_ns + int(monotonic_s * 1e9)

        parent = self._propagator.extract(dict(live.request.caller.trace))
        span = self._tracer.start_span(
            "llm_request",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=at(times.arrived),
            attributes=_attributes(live, now_s),
        )
        context = set_span_in_context(span)
        first = times.first_token or now_s
        for name, begin_s, end_s in (
            ("tokenize", times.tokenizing, times.tokenized),
            ("queue", times.queued, times.scheduled or now_s),
            ("prefill", times.scheduled, first),
            ("decode", times.first_token, now_s),
        ):
            if begin_s and end_s:
                child = self._tracer.start_span(name, context=context, start_time=at(begin_s))
                child.end(at(end_s))
        if error is not None:
            span.set_status(Status(StatusCode.ERROR, str(error)))
        span.end(at(now_s))

    def close(self) -> None:
        """Send the remaining spans. Blocks for up to `CLOSE_TIMEOUT_MS`."""
        self._processor.force_flush(CLOSE_TIMEOUT_MS)
        self._provider.shutdown()


def _exporter(endpoint: str) -> Any:
    """Return an HTTP exporter if the variable `PROTOCOL_VARIABLE` is "http/protobuf", else a gRPC exporter."""
    if os.environ.get(PROTOCOL_VARIABLE, "grpc") == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as ByHttp

        return ByHttp(endpoint=endpoint, timeout=CLOSE_TIMEOUT_MS / 1000)
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as ByGrpc

    return ByGrpc(endpoint=endpoint, insecure=not endpoint.startswith("https"), timeout=CLOSE_TIMEOUT_MS / 1000)


def _attributes(live: LiveRequest, now_s: float) -> dict[str, Any]:
    """Return a request's counts, times and finish reasons. Texts are never exported."""
    times = live.times
    attributes: dict[str, Any] = {
        "gen_ai.request.id": live.request.label,
        "gen_ai.usage.prompt_tokens": max(
            (chunk.usage.prompt for chunk in live.ends), default=len(live.request.ids or ())
        ),
        "gen_ai.usage.completion_tokens": sum(chunk.usage.output for chunk in live.ends),
        "gen_ai.usage.cached_tokens": sum(chunk.usage.cached for chunk in live.ends),
        "gen_ai.latency.e2e": now_s - times.arrived,
        "gen_ai.response.finish_reasons": [chunk.finish.kind for chunk in live.ends if chunk.finish],
    }
    if times.scheduled:
        attributes["gen_ai.latency.time_in_queue"] = times.scheduled - (times.queued or times.arrived)
    if times.first_token:
        attributes["gen_ai.latency.time_to_first_token"] = times.first_token - times.arrived
    return attributes
