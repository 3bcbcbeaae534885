"""`/api/chat` and `/api/generate`: the handlers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.actors.output_stream import close_all
from runtime.errors import InvalidRequest
from runtime.request import Chunk, Request
from serve.chat.events import ChatEvent, Content
from serve.chat.request import prepare
from serve.decode import decode
from serve.endpoint import json_response, or_disconnect, parse_object, read_body
from serve.ollama.answer import FRAMING, Answer, in_message, in_response
from serve.ollama.conversation import chat_of, chat_of_prompt, logprobs_of
from serve.ollama.errors import ERROR_FORMAT
from serve.ollama.models import served_name
from serve.ollama.schema import ChatBody, GenerateBody
from serve.openai.response_format import grammar_of
from serve.prompts import of_client
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
    streams = core.submit_all(of_client(core, [call.request]))
    if call.stream:
        return EventStream(streams, answer, ERROR_FORMAT, framing=FRAMING)
    try:
        return json_response(await or_disconnect(answer.whole(streams[0]), http.receive))
    finally:
        close_all(streams)


def _read_chat(core: EngineCore, raw: bytes) -> _Call:
    body = decode(ChatBody, parse_object(raw))
    model = served_name(core, body.model)
    if not body.messages:
        return _Call(model, body.stream, None, _as_text)
    prepared = prepare(core, chat_of(body))
    return _Call(model, body.stream, prepared.request, prepared.new_parser().feed_chunk)


def _read_generate(core: EngineCore, raw: bytes) -> _Call:
    body = decode(GenerateBody, parse_object(raw))
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
    )


def _as_text(chunk: Chunk) -> list[ChatEvent]:
    return [Content(chunk.text)] if chunk.text else []
