"""The handler of `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import anyio.to_thread
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from runtime.request import Chunk
from serve.calls.bootstrap import with_prefill_server
from serve.calls.chat.prepare import PreparedChat, prepare
from serve.calls.chat_completions.answers import AnswerHeader
from serve.calls.chat_completions.chat import ChatEvents, chat_answer
from serve.calls.chat_completions.messages import chat_of
from serve.calls.chat_completions.requests import decode_body
from serve.calls.chat_completions.schema import NAMES, ChatBody
from serve.calls.prompts import of_client
from serve.calls.served_model import adapters_of, choose_model
from serve.http.endpoint import decodes, json_response, read_all_or_disconnect, read_call
from serve.http.errors import ErrorFormat, openai_body
from serve.http.sse import EventStream

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore
    from runtime.tokenizer.tokenizer import Tokenizer

ERROR_FORMAT = ErrorFormat(openai_body, {**NAMES, "text": "messages", "top_logprobs_num": "top_logprobs"})


@dataclass(frozen=True, slots=True)
class _Call:
    """A call whose body is decoded and checked."""

    body: ChatBody
    model: str
    prepared: PreparedChat


@decodes(ChatBody)
async def create(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Answer a chat with a message, complete or streamed."""
    call = await read_call(http, core, _read)
    request = call.prepared.request
    header = AnswerHeader.of(core, request.label, call.model)
    streams = await core.submit_all(of_client(core, [request]))
    if call.body.stream:
        events = ChatEvents(header, core.tokenizer, call.prepared, call.body.stream_options)
        return EventStream(streams, events, ERROR_FORMAT)
    [chunks] = await read_all_or_disconnect(streams, http.receive)
    answer = partial(_response, header, core.tokenizer, call.prepared, chunks)
    listed = call.body.logprobs or call.body.prompt_logprobs is not None or call.body.return_routed_experts
    if listed or call.prepared.parses:
        # In a thread, because serializing long lists and texts would block the event loop.
        return await anyio.to_thread.run_sync(answer)
    return answer()


def _response(
    header: AnswerHeader, tokenizer: Tokenizer | None, prepared: PreparedChat, chunks: Sequence[Chunk]
) -> Response:
    return json_response(chat_answer(header, tokenizer, prepared, chunks))


def _read(core: EngineCore, raw: bytes) -> _Call:
    body = decode_body(ChatBody, raw, core)
    model = choose_model(core, body.model)
    [adapter] = adapters_of(model, body.lora_path, 1)
    prepared = prepare(core, chat_of(body), adapter)
    [request] = with_prefill_server(body, core, [prepared.request])
    return _Call(body, model.name, replace(prepared, request=request))
