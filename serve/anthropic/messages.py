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
from serve.chat.request import PreparedChat, prepare, render
from serve.decode import decode
from serve.endpoint import json_response, parse_object, read_all_or_disconnect, read_body, read_call
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
    streams = core.submit_all(of_client(core, [call.prepared.request]))
    if call.stream:
        events = MessageEvents(call.prepared, call.model)
        return EventStream(streams, events, ERROR_FORMAT, framing=FRAMING)
    [[chunk]] = await read_all_or_disconnect(streams, http.receive)
    answer = await anyio.to_thread.run_sync(message_answer, call.prepared, chunk, call.model)
    return json_response(answer)


def _read(core: EngineCore, raw: bytes) -> _Call:
    body = decode(MessagesBody, parse_object(raw))
    model = check_model(core, body.model)
    chat = chat_of(body, label=f"msg_{uuid4().hex}")
    return _Call(model, body.stream, prepare(core, chat))


async def count_tokens(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """How many tokens the prompt of such a body has."""
    text = await read_body(http, partial(_prompt, core))
    return json_response({"input_tokens": await anyio.to_thread.run_sync(_count, core, text)})


def _prompt(core: EngineCore, raw: bytes) -> str:
    body = decode(CountBody, parse_object(raw))
    check_model(core, body.model)
    return render(core, chat_of(body, label=""))


def _count(core: EngineCore, text: str) -> int:
    if core.tokenizer is None:  # `render` has refused it
        return 0
    [ids] = core.tokenizer.encode_batch([text], add_special_tokens=False)
    return len(ids)
