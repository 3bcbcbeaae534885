"""The handler of `/generate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import anyio.to_thread
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from runtime.request import Chunk, Request
from runtime.sampling_params import SamplingParams
from serve.calls.body import decode_open, parse_object
from serve.calls.generate.answers import GenerateAnswers
from serve.calls.generate.schema import GenerateBody, requests_of
from serve.calls.hidden_states import as_fragment
from serve.calls.prompts import of_client
from serve.calls.work_budget import check_repeated
from serve.http.endpoint import decodes, json_response, read_all_or_disconnect, read_call
from serve.http.errors import ErrorFormat, native_body
from serve.http.sse import EventStream

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

ERROR_FORMAT = ErrorFormat(
    native_body,
    {
        name: f"sampling_params.{name}"
        for name in SamplingParams.__dataclass_fields__
        if name not in GenerateBody.__dataclass_fields__
    },
)


@decodes(GenerateBody)
async def generate(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Generate text and token ids from one or several prompts, complete or streamed."""
    body, requests = await read_call(http, core, _read)
    single = not body.is_batch and requests[0].sampling.n == 1
    if body.stream and not body.incremental:
        check_repeated(requests, core.plan.model.context_length)
    answers = GenerateAnswers(core, requests, indexed=not single, incremental=body.incremental)
    streams = await core.submit_all(of_client(core, requests))
    answers.follow(streams)
    if body.stream:
        return EventStream(streams, answers, ERROR_FORMAT)
    chunks = await read_all_or_disconnect(streams, http.receive)
    # In a thread, because serializing long lists would block the event loop.
    if any(request.logprobs or request.returns_parts for request in requests):
        return await anyio.to_thread.run_sync(_response, answers, chunks, single)
    return _response(answers, chunks, single)


def _read(core: EngineCore, raw: bytes) -> tuple[GenerateBody, list[Request]]:
    body = decode_open(GenerateBody, parse_object(raw), core, "/generate")
    return body, requests_of(body, core, owned=True)


def _response(answers: GenerateAnswers, chunks: Sequence[Sequence[Chunk]], single: bool) -> Response:
    results = answers.whole(chunks)
    for result in results:
        if "hidden_states" in result["meta_info"]:
            result["meta_info"]["hidden_states"] = as_fragment(result["meta_info"]["hidden_states"])
    if single:
        return json_response(results[0])
    # Each answer is a separate call, because orjson holds the GIL during a call, which delays all streams.
    parts = [orjson.dumps(answer) for answer in results]
    return Response(b"[" + b",".join(parts) + b"]", media_type="application/json")
