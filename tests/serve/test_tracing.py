"""`--enable-trace`: the spans of a request that a collector receives."""

from __future__ import annotations

from concurrent import futures
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

import http_server
import tiny_models
from runtime.actors.tracing import RequestTraces
from runtime.errors import CheckpointError
from serve import Engine
from serve.server.app import build_app

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector that keeps the received spans."""

    def __init__(self) -> None:
        self.spans: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for each in request.resource_spans:
            for scope in each.scope_spans:
                self.spans += scope.spans
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_a_collector_receives_the_spans_of_requests():
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    ask = {"text": "Once", "rid": "mine", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    options = {"enable_trace": True, "oltp_traces_endpoint": f"127.0.0.1:{port}"}
    async with (
        Engine(tiny_models.cached(), **options) as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        assert (await http.post("/generate", json=ask, headers=headers)).status_code == 200
        assert (await http.post("/generate", json={**ask, "rid": "alone"})).status_code == 200
    server.stop(None)
    by_id = {span.span_id: span for span in collector.spans}
    roots = {
        attribute.value.string_value: span
        for span in collector.spans
        for attribute in span.attributes
        if attribute.key == "gen_ai.request.id"
    }
    assert set(roots) == {"mine", "alone"}
    mine = roots["mine"]
    assert (mine.trace_id.hex(), mine.parent_span_id.hex()) == (TRACE, PARENT)
    assert roots["alone"].trace_id != mine.trace_id
    counts = {each.key: each.value.int_value for each in mine.attributes}
    assert counts["gen_ai.usage.completion_tokens"] == 4
    parts = [span for span in collector.spans if span.parent_span_id == mine.span_id]
    assert [span.name for span in parts] == ["tokenize", "queue", "prefill", "decode"]
    for span in parts:
        assert by_id[span.parent_span_id].start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= mine.end_time_unix_nano


async def test_a_start_that_fails_closes_the_exporter(monkeypatch: pytest.MonkeyPatch):
    closed: list[RequestTraces] = []
    close = RequestTraces.close
    monkeypatch.setattr(RequestTraces, "close", lambda traces: (closed.append(traces), close(traces)))
    options = {"enable_trace": True, "oltp_traces_endpoint": "127.0.0.1:1"}
    with pytest.raises(CheckpointError, match="must be a Whisper model"):
        await Engine(tiny_models.cached(), transcription_model=tiny_models.cached(), **options).start()
    assert len(closed) == 1
