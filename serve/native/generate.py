"""The door of `/generate`."""

from __future__ import annotations

import anyio.to_thread
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from runtime.request import Chunk, Request
from runtime.sampling_params import SamplingParams
from serve.body import parse_object, read_body
from serve.core import EngineCore
from serve.decode import decode
from serve.errors import Dialect, native_body
from serve.native.answers import Answers
from serve.native.schema import GenerateBody, requests_of
from serve.replies import json_response, submit_all, wait_all
from serve.sse import EventStream

DIALECT = Dialect(
    native_body,
    {name: f"sampling_params.{name}" for name in SamplingParams.__dataclass_fields__},
)


class GenerateDoor:
    """Prompt or prompts in, text and ids out, whole or streamed."""

    def __init__(self, core: EngineCore, *, max_body_bytes: int) -> None:
        self._core = core
        self._max_body_bytes = max_body_bytes

    async def generate(self, http: HttpRequest) -> ASGIApp:
        body, requests = await read_body(http, self._read, limit=self._max_body_bytes)
        core = self._core
        single = not body.is_batch and requests[0].sampling.n == 1
        answers = Answers(
            requests,
            indexed=not single,
            weight_version=core.plan.serve.weight_version,
            token_text=core.tokenizer.token_text if core.tokenizer else None,
        )
        replies = submit_all(core, requests)
        if body.stream:
            return EventStream(replies, answers, DIALECT)
        chunks = await wait_all(replies, http.receive)
        if any(request.logprobs for request in requests):  # long lists
            return await anyio.to_thread.run_sync(self._answer, answers, chunks, single)
        return self._answer(answers, chunks, single)

    def _answer(self, answers: Answers, chunks: list[list[Chunk]], single: bool) -> Response:
        found = answers.whole(chunks)
        return json_response(found[0] if single else found)

    def _read(self, raw: bytes) -> tuple[GenerateBody, list[Request]]:
        body = decode(GenerateBody, parse_object(raw))
        return body, requests_of(body, self._core)
