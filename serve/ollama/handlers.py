"""The handlers of `/api/chat`, `/api/generate`, `/api/embed` and `/api/embeddings`."""

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
from serve.calls.body import decode_open, parse_object
from serve.calls.chat.events import ChatEvent, Content
from serve.calls.chat.prepare import prepare
from serve.calls.prompts import of_client, vector_requests
from serve.calls.response_format import grammar_of
from serve.calls.sampling import sampling_of_call
from serve.calls.served_model import with_adapter
from serve.calls.vectors import check_vectors, vector_of
from serve.http.endpoint import (
    compute,
    decodes,
    json_response,
    or_disconnect,
    read_body,
    read_call,
)
from serve.http.sse import EventStream
from serve.ollama.answer import FRAMING, Answer, in_message, in_response
from serve.ollama.conversation import chat_of, chat_of_prompt, logprobs_of
from serve.ollama.errors import ERROR_FORMAT
from serve.ollama.models import chosen_model
from serve.ollama.schema import ChatBody, EmbedBody, EmbeddingsBody, GenerateBody

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


class _Call(NamedTuple):
    """A decoded and checked call. `request` is None if the body has no prompt: it only asks to load the model."""

    model: str
    stream: bool
    request: Request | None
    parse: Callable[[Chunk], Iterable[ChatEvent]]


@decodes(ChatBody)
async def chat(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Answer a chat with a message, streamed unless `stream` is false."""
    call = await read_body(http, partial(_read_chat, core), any_type=True)
    return await _answer(http, core, call, Answer(call.model, in_message, call.parse, core.tokenizer))


@decodes(GenerateBody)
async def generate(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Generate text from a prompt, streamed unless `stream` is false."""
    call = await read_body(http, partial(_read_generate, core), any_type=True)
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
    model, adapter = chosen_model(core, body.model)
    if not body.messages:
        return _Call(model, body.stream, None, _as_text)
    prepared = prepare(core, chat_of(body), adapter)
    return _Call(model, body.stream, prepared.request, prepared.new_parser().feed_chunk)


def _read_generate(core: EngineCore, raw: bytes) -> _Call:
    body = decode_open(GenerateBody, parse_object(raw), core, "/api/generate")
    model, adapter = chosen_model(core, body.model)
    if not body.prompt:
        return _Call(model, body.stream, None, _as_text)
    if body.raw:
        return _Call(model, body.stream, _raw_request(core, body, adapter), _as_text)
    prepared = prepare(core, chat_of_prompt(body), adapter)
    return _Call(model, body.stream, prepared.request, prepared.new_parser().feed_chunk)


def _raw_request(core: EngineCore, body: GenerateBody, adapter: str | None) -> Request:
    """Return a request for a prompt without the chat template. Raises `InvalidRequest` for fields that need one."""
    for name, value in (("system", body.system), ("think", body.think), ("images", body.images)):
        if value:
            raise InvalidRequest(f"{name} requires the chat template, which raw disables.", param=name)
    serve = core.plan.serve
    sampling = body.options.sampling()
    return Request(
        text=body.prompt,
        sampling=sampling_of_call(core, "chat", sampling),
        grammar=grammar_of(body.response_format()),
        logprobs=logprobs_of(body),
        truncate=serve.allow_auto_truncate,
        cut_output=True,
        lora=adapter,
    )


# --- embeddings ---


@decodes(EmbedBody)
async def embed(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the embedding of each text."""
    begun = time.perf_counter_ns()
    body, model, requests = await read_call(http, core, _read_embed, any_type=True)
    chunks = await compute(http, core, requests)
    answer = {
        "model": model,
        "embeddings": [vector_of(chunk, body.dimensions) for [chunk] in chunks],
        "total_duration": time.perf_counter_ns() - begun,
        "load_duration": 0,
        "prompt_eval_count": sum(chunk.usage.prompt for [chunk] in chunks),
    }
    return await anyio.to_thread.run_sync(json_response, answer)


@decodes(EmbeddingsBody)
async def embeddings(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the embedding of one text, in the format of Ollama's older API."""
    requests = await read_call(http, core, _read_embeddings, any_type=True)
    [[chunk]] = await compute(http, core, requests)
    return json_response({"embedding": vector_of(chunk, None)})


def _read_embed(core: EngineCore, raw: bytes) -> tuple[EmbedBody, str, list[Request]]:
    body = decode_open(EmbedBody, parse_object(raw), core, "/api/embed")
    model, adapter = chosen_model(core, body.model)
    check_vectors(core, body.dimensions)
    return body, model, with_adapter(_vectors_of(core, body.input, truncate=body.truncate), adapter)


def _read_embeddings(core: EngineCore, raw: bytes) -> list[Request]:
    body = decode_open(EmbeddingsBody, parse_object(raw), core, "/api/embeddings")
    _, adapter = chosen_model(core, body.model)
    check_vectors(core, None)
    return with_adapter(_vectors_of(core, body.prompt, truncate=True, name="prompt"), adapter)


def _vectors_of(core: EngineCore, prompt: str | list[str], *, truncate: bool, name: str = "input") -> list[Request]:
    texts = [prompt] if isinstance(prompt, str) else prompt
    for index, text in enumerate(texts):
        if not text:
            param = name if isinstance(prompt, str) else f"{name}.{index}"
            raise InvalidRequest(f"{param} must not be empty.", param=param)
    return vector_requests([Request(text=text) for text in texts], core, truncate=truncate)


def _as_text(chunk: Chunk) -> list[ChatEvent]:
    return [Content(chunk.text)] if chunk.text else []
