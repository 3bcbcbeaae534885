"""`/api/chat`, `/api/generate`, `/api/embed` and `/api/embeddings`: the handlers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import anyio.to_thread
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.actors.output_stream import close_all
from runtime.errors import InvalidRequest
from runtime.request import Chunk, Request
from serve.chat.events import ChatEvent, Content
from serve.chat.request import prepare
from serve.endpoint import (
    decode_open,
    json_response,
    or_disconnect,
    parse_object,
    read_all_or_disconnect,
    read_body,
    read_call,
)
from serve.ollama.answer import FRAMING, Answer, in_message, in_response
from serve.ollama.conversation import chat_of, chat_of_prompt, logprobs_of
from serve.ollama.errors import ERROR_FORMAT
from serve.ollama.models import served_name
from serve.ollama.schema import ChatBody, EmbedBody, EmbeddingsBody, GenerateBody
from serve.openai.embeddings import check_vectors, vector_of
from serve.openai.response_format import grammar_of
from serve.prompts import of_client, vector_requests
from serve.sampling import sampling_params
from serve.sse import EventStream

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


class _Call(NamedTuple):
    """One call, read and checked. Without a request only the model was asked for: it is loaded."""

    model: str
    stream: bool
    request: Request | None
    parse: Callable[[Chunk], Iterable[ChatEvent]]


async def chat(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Messages in, a message out; streamed unless `stream` is false."""
    call = await read_body(http, partial(_read_chat, core))
    return await _answer(http, core, call, Answer(call.model, in_message, call.parse, core.tokenizer))


async def generate(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """A prompt in, text out; streamed unless `stream` is false."""
    call = await read_body(http, partial(_read_generate, core))
    return await _answer(http, core, call, Answer(call.model, in_response, call.parse, core.tokenizer))


async def _answer(http: HttpRequest, core: EngineCore, call: _Call, answer: Answer) -> ASGIApp:
    if call.request is None:
        return json_response(answer.loaded())
    streams = await core.submit_all(of_client(core, [call.request]))
    if call.stream:
        return EventStream(streams, answer, ERROR_FORMAT, framing=FRAMING)
    try:
        return json_response(await or_disconnect(answer.whole(streams[0]), http.receive))
    finally:
        close_all(streams)


def _read_chat(core: EngineCore, raw: bytes) -> _Call:
    body = decode_open(ChatBody, parse_object(raw), core, "/api/chat")
    model = served_name(core, body.model)
    if not body.messages:
        return _Call(model, body.stream, None, _as_text)
    prepared = prepare(core, chat_of(body))
    return _Call(model, body.stream, prepared.request, prepared.new_parser().feed_chunk)


def _read_generate(core: EngineCore, raw: bytes) -> _Call:
    body = decode_open(GenerateBody, parse_object(raw), core, "/api/generate")
    model = served_name(core, body.model)
    if not body.prompt:
        return _Call(model, body.stream, None, _as_text)
    if body.raw:
        return _Call(model, body.stream, _raw_request(core, body), _as_text)
    prepared = prepare(core, chat_of_prompt(body))
    return _Call(model, body.stream, prepared.request, prepared.new_parser().feed_chunk)


def _raw_request(core: EngineCore, body: GenerateBody) -> Request:
    """The prompt as it is, without the chat template."""
    for name, given in (("system", body.system), ("think", body.think)):
        if given:
            raise InvalidRequest(f"{name} belongs to the chat template, which raw leaves out.", param=name)
    serve = core.plan.serve
    asked = body.options.sampling()
    return Request(
        text=body.prompt,
        sampling=sampling_params("chat", asked, serve.preferred_sampling, facts=core.facts),
        grammar=grammar_of(body.response_format()),
        logprobs=logprobs_of(body),
        truncate=serve.allow_auto_truncate,
        cut_output=True,
    )


# --- vectors ---


async def embed(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """A vector for each text."""
    begun = time.perf_counter_ns()
    body, model, requests = await read_call(http, core, _read_embed)
    chunks = await read_all_or_disconnect(await core.submit_all(of_client(core, requests)), http.receive)
    answer = {
        "model": model,
        "embeddings": [vector_of(chunk, body.dimensions) for [chunk] in chunks],
        "total_duration": time.perf_counter_ns() - begun,
        "load_duration": 0,
        "prompt_eval_count": sum(chunk.usage.prompt for [chunk] in chunks),
    }
    return await anyio.to_thread.run_sync(json_response, answer)


async def embeddings(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """The vector of one text, in the words of the older API."""
    requests = await read_call(http, core, _read_embeddings)
    [[chunk]] = await read_all_or_disconnect(await core.submit_all(of_client(core, requests)), http.receive)
    return json_response({"embedding": vector_of(chunk, None)})


def _read_embed(core: EngineCore, raw: bytes) -> tuple[EmbedBody, str, list[Request]]:
    body = decode_open(EmbedBody, parse_object(raw), core, "/api/embed")
    model = served_name(core, body.model)
    check_vectors(core, body.dimensions)
    return body, model, _vectors_of(core, body.input, truncate=body.truncate)


def _read_embeddings(core: EngineCore, raw: bytes) -> list[Request]:
    body = decode_open(EmbeddingsBody, parse_object(raw), core, "/api/embeddings")
    served_name(core, body.model)
    check_vectors(core, None)
    return _vectors_of(core, body.prompt, truncate=True, name="prompt")


def _vectors_of(
    core: EngineCore, given: str | list[str], *, truncate: bool, name: str = "input"
) -> list[Request]:
    texts = [given] if isinstance(given, str) else given
    for index, text in enumerate(texts):
        if not text:
            param = name if isinstance(given, str) else f"{name}.{index}"
            raise InvalidRequest(f"{param} must not be empty.", param=param)
    return vector_requests([Request(text=text) for text in texts], core, truncate=truncate)


def _as_text(chunk: Chunk) -> list[ChatEvent]:
    return [Content(chunk.text)] if chunk.text else []
