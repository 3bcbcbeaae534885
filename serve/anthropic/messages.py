"""The handlers of `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple
from uuid import uuid4

import anyio.to_thread
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from serve.anthropic.answer import FRAMING, MessageEvents, message_answer
from serve.anthropic.conversation import chat_of
from serve.anthropic.errors import ERROR_FORMAT
from serve.anthropic.schema import CountBody, MessagesBody
from serve.calls.body import decode_open, parse_object
from serve.calls.chat.prepare import CountedPrompt, PreparedChat, counted_prompt, prepare
from serve.calls.prompts import of_client
from serve.calls.served_model import choose_model
from serve.http.endpoint import decodes, json_response, read_all_or_disconnect, read_body, read_call
from serve.http.sse import EventStream

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

__all__ = ["ERROR_FORMAT", "count_tokens", "create"]


class _Call(NamedTuple):
    """A call whose body is decoded and checked."""

    model: str
    stream: bool
    prepared: PreparedChat


@decodes(MessagesBody)
async def create(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Answer a chat with a message, complete or streamed."""
    call = await read_call(http, core, _read)
    streams = await core.submit_all(of_client(core, [call.prepared.request]))
    if call.stream:
        events = MessageEvents(call.prepared, call.model)
        return EventStream(streams, events, ERROR_FORMAT, framing=FRAMING)
    [[chunk]] = await read_all_or_disconnect(streams, http.receive)
    answer = await anyio.to_thread.run_sync(message_answer, call.prepared, chunk, call.model)
    return json_response(answer)


def _read(core: EngineCore, raw: bytes) -> _Call:
    body = decode_open(MessagesBody, parse_object(raw), core, "/v1/messages")
    model = choose_model(core, body.model)
    chat = chat_of(body, label=f"msg_{uuid4().hex}")
    return _Call(model.name, body.stream, prepare(core, chat, model.adapter))


@decodes(CountBody)
async def count_tokens(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the number of prompt tokens of a body."""
    prompt = await read_body(http, partial(_count, core), inline_bytes=0)
    return json_response({"input_tokens": len(await prompt.ids(core))})


def _count(core: EngineCore, raw: bytes) -> CountedPrompt:
    body = decode_open(CountBody, parse_object(raw), core, "/v1/messages/count_tokens")
    choose_model(core, body.model)
    return counted_prompt(core, chat_of(body, label=""))
