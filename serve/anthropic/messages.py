"""`/v1/messages` and `/v1/messages/count_tokens`: the handlers."""

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
from serve.chat.request import PreparedChat, prepare
from serve.chat.request import count_tokens as num_tokens
from serve.endpoint import (
    decode_open,
    json_response,
    parse_object,
    read_all_or_disconnect,
    read_body,
    read_call,
)
from serve.openai.models import check_model
from serve.prompts import of_client
from serve.sse import EventStream

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

__all__ = ["ERROR_FORMAT", "count_tokens", "create"]


class _Call(NamedTuple):
    """One call, read and checked."""

    model: str
    stream: bool
    prepared: PreparedChat


async def create(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Messages in, a message out, whole or streamed."""
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
    model = check_model(core, body.model)
    chat = chat_of(body, label=f"msg_{uuid4().hex}")
    return _Call(model, body.stream, prepare(core, chat))


async def count_tokens(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """How many tokens the prompt of such a body has."""
    return json_response({"input_tokens": await read_body(http, partial(_count, core), inline_bytes=0)})


def _count(core: EngineCore, raw: bytes) -> int:
    body = decode_open(CountBody, parse_object(raw), core, "/v1/messages/count_tokens")
    check_model(core, body.model)
    return num_tokens(core, chat_of(body, label=""))
