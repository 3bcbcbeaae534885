"""`/generate`: the handler, and its answers: dicts when they are whole, events when they stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from runtime.request import Chunk, Finish, Logprobs, Request
from runtime.sampling_params import SamplingParams
from serve.endpoint import decode_open, json_response, parse_object, read_all_or_disconnect, read_call
from serve.errors import ErrorFormat, native_body
from serve.native.schema import GenerateBody, requests_of
from serve.prompts import of_client
from serve.sse import EventStream
from serve.work_budget import check_repeated

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

ERROR_FORMAT = ErrorFormat(
    native_body,
    {name: f"sampling_params.{name}" for name in SamplingParams.__dataclass_fields__},
)

TokenText = Callable[[int], str]


async def generate(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Prompt or prompts in, text and token ids out, whole or streamed."""
    body, requests = await read_call(http, core, _read)
    single = not body.is_batch and requests[0].sampling.n == 1
    if body.stream and not body.incremental:
        check_repeated(requests, core.plan.model.context_length)
    answers = GenerateAnswers(core, requests, indexed=not single, incremental=body.incremental)
    streams = await core.submit_all(of_client(core, requests))
    if body.stream:
        return EventStream(streams, answers, ERROR_FORMAT)
    chunks = await read_all_or_disconnect(streams, http.receive)
    if any(request.logprobs for request in requests):  # long lists
        return await anyio.to_thread.run_sync(_response, answers, chunks, single)
    return _response(answers, chunks, single)


def _read(core: EngineCore, raw: bytes) -> tuple[GenerateBody, list[Request]]:
    body = decode_open(GenerateBody, parse_object(raw), core, "/generate")
    return body, requests_of(body, core, owned=True)


def _response(answers: GenerateAnswers, chunks: Sequence[Sequence[Chunk]], single: bool) -> Response:
    found = answers.whole(chunks)
    if single:
        return json_response(found[0])
    # One by one: writing JSON holds the interpreter, and so everybody's streams, until it is done.
    parts = [orjson.dumps(answer) for answer in found]
    return Response(b"[" + b",".join(parts) + b"]", media_type="application/json")


class GenerateAnswers:
    """Makes the answers of one call to `/generate`, or to `Engine.generate`.

    `indexed`: events carry the number of their choice, counted prompt by prompt. `incremental`: they hold what is
    new since the last one, instead of all text and all log-probabilities so far.
    """

    def __init__(
        self, core: EngineCore, requests: Sequence[Request], *, indexed: bool, incremental: bool = False
    ) -> None:
        self._requests = requests
        self._indexed = indexed
        self._incremental = incremental
        self._weight_version = core.plan.serve.weight_version
        self._token_text = core.tokenizer.token_text if core.tokenizer else None
        self._started_s = time.perf_counter()
        self._growing: dict[tuple[int, int], _Growing] = {}

    def whole(self, answers: Sequence[Sequence[Chunk]]) -> list[dict[str, Any]]:
        """Prompt by prompt, choice by choice."""
        return [
            {
                "text": chunk.text,
                "output_ids": chunk.ids,
                "meta_info": self._meta(request, chunk) | self._logprobs(request, chunk),
            }
            for request, chunks in zip(self._requests, answers, strict=True)
            for chunk in chunks
        ]

    def embeddings(self, answers: Sequence[Sequence[Chunk]]) -> list[dict[str, Any]]:
        """Prompt by prompt, for requests that want a vector."""
        return [
            {"embedding": chunk.embedding, "meta_info": self._meta(request, chunk)}
            for request, chunks in zip(self._requests, answers, strict=True)
            for chunk in chunks
        ]

    # --- streaming: see serve.sse.Encoder ---

    def events(self, request_index: int, chunks: Sequence[Chunk]) -> bytes:
        return b"".join([self._event(request_index, chunk) for chunk in chunks])

    def closing(self) -> bytes:
        return b""

    def _event(self, request_index: int, chunk: Chunk) -> bytes:
        request = self._requests[request_index]
        growing = self._growing.get((request_index, chunk.index))
        if growing is None:
            tail = self._tail(request, request_index * request.sampling.n + chunk.index)
            growing = self._growing[request_index, chunk.index] = _Growing(tail)
        elif self._incremental:
            growing.clear()
        growing.add_text(chunk.text)
        if request.logprobs is not None:
            growing.add_lists(self._logprobs(request, chunk))
        usage = chunk.usage
        late = b""
        if chunk.finish is not None:
            late = b',"e2e_latency":%.6f' % (time.perf_counter() - self._started_s)
        return b'data: {"text":"%b","output_ids":%b,"meta_info":{"finish_reason":%b,%b%b%b,%b' % (
            growing.text,
            orjson.dumps(chunk.ids),
            b"null" if chunk.finish is None else orjson.dumps(finish_reason(chunk.finish)),
            b'"prompt_tokens":%d,"completion_tokens":%d,"cached_tokens":%d' % usage,
            late,
            growing.lists_json(),
            growing.tail,
        )

    def _tail(self, request: Request, number: int) -> bytes:
        """The end of every event of one choice."""
        names = orjson.dumps({"id": request.label, "weight_version": self._weight_version})[1:]
        index = b',"index":%d' % number if self._indexed else b""
        return names + index + b"}\n\n"

    # --- both ---

    def _meta(self, request: Request, chunk: Chunk) -> dict[str, Any]:
        return {
            "id": request.label,
            "finish_reason": finish_reason(chunk.finish),
            "prompt_tokens": chunk.usage.prompt,
            "weight_version": self._weight_version,
            "completion_tokens": chunk.usage.output,
            "cached_tokens": chunk.usage.cached,
            "e2e_latency": time.perf_counter() - self._started_s,
        }

    def _logprobs(self, request: Request, chunk: Chunk) -> dict[str, list[Any]]:
        wanted = request.logprobs
        if wanted is None:
            return {}
        text = self._token_text if wanted.text else None
        lists: dict[str, list[Any]] = {}
        for side, logprobs in (("input", chunk.prompt_logprobs), ("output", chunk.logprobs)):
            found = logprobs or Logprobs([], [], [])
            lists[f"{side}_token_logprobs"] = _entries(found.chosen, text)
            if wanted.top:
                lists[f"{side}_top_logprobs"] = [_optional(pairs, text) for pairs in found.top]
            if wanted.token_ids:
                lists[f"{side}_token_ids_logprobs"] = [_optional(pairs, text) for pairs in found.requested]
        return lists


def finish_reason(finish: Finish | None) -> dict[str, Any] | None:
    """As `meta_info` says it."""
    if finish is None:
        return None
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": finish.length}
    message = finish.message or "Aborted."
    return {"type": "abort", "message": message, "status_code": None, "err_type": None}


def _entries(pairs: Iterable[tuple[float | None, int]], text: TokenText | None) -> list[list[Any]]:
    return [[logprob, token_id, text(token_id) if text else None] for logprob, token_id in pairs]


def _optional(pairs: Sequence[tuple[float, int]] | None, text: TokenText | None) -> list[list[Any]] | None:
    return None if pairs is None else _entries(pairs, text)


class _Growing:
    """What the events of one choice repeat and extend, kept as JSON so that nothing is written twice."""

    __slots__ = ("lists", "tail", "text")

    def __init__(self, tail: bytes) -> None:
        self.tail = tail
        self.text = bytearray()  # a JSON string without its quotes
        self.lists: dict[str, bytearray] = {}  # JSON lists without their brackets

    def clear(self) -> None:
        """Forget what was written, but for which lists there are."""
        self.text.clear()
        for items in self.lists.values():
            items.clear()

    def add_text(self, text: str) -> None:
        self.text += orjson.dumps(text)[1:-1]

    def add_lists(self, lists: dict[str, list[Any]]) -> None:
        for name, items in lists.items():
            grown = self.lists.setdefault(name, bytearray())
            if items:
                if grown:
                    grown += b","
                grown += orjson.dumps(items)[1:-1]

    def lists_json(self) -> bytes:
        return b"".join([b',"%b":[%b]' % (name.encode(), items) for name, items in self.lists.items()])
