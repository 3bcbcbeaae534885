"""`/v1/chat/completions`: the handler, and the answer, whole or streamed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from runtime.request import Chunk, Finish
from serve.chat.events import (
    AssistantMessage,
    ChatEvent,
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from serve.chat.parser import OutputParser
from serve.chat.request import PreparedChat, prepare
from serve.endpoint import json_response, read_all_or_disconnect, read_call
from serve.errors import ErrorFormat, ended, openai_body
from serve.openai.answers import AnswerHeader, UsageCount, event_end
from serve.openai.logprobs import chat_logprobs
from serve.openai.messages import chat_of
from serve.openai.models import check_model
from serve.openai.requests import decode_body
from serve.openai.schema import NAMES, ChatBody, StreamOptions
from serve.prompts import of_client
from serve.sse import EventStream

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore
    from runtime.tokenizer.tokenizer import Tokenizer

ERROR_FORMAT = ErrorFormat(openai_body, {**NAMES, "text": "messages", "top_logprobs_num": "top_logprobs"})


@dataclass(frozen=True, slots=True)
class _Call:
    """One call, read and checked."""

    body: ChatBody
    model: str
    prepared: PreparedChat


async def create(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Messages in, a message out, whole or streamed."""
    call = await read_call(http, core, _read)
    request = call.prepared.request
    header = AnswerHeader.of(core, request.label, call.model)
    streams = await core.submit_all(of_client(core, [request]))
    if call.body.stream:
        events = ChatEvents(header, core.tokenizer, call.prepared, call.body.stream_options)
        return EventStream(streams, events, ERROR_FORMAT)
    [chunks] = await read_all_or_disconnect(streams, http.receive)
    answer = partial(_response, header, core.tokenizer, call.prepared, chunks)
    if call.body.logprobs or call.prepared.parses:  # long lists, long texts
        return await anyio.to_thread.run_sync(answer)
    return answer()


def _response(
    header: AnswerHeader, tokenizer: Tokenizer | None, prepared: PreparedChat, chunks: Sequence[Chunk]
) -> Response:
    return json_response(chat_answer(header, tokenizer, prepared, chunks))


def _read(core: EngineCore, raw: bytes) -> _Call:
    body = decode_body(ChatBody, raw, core)
    model = check_model(core, body.model)
    return _Call(body, model, prepare(core, chat_of(body)))


# --- the answer ---


def chat_answer(
    header: AnswerHeader, tokenizer: Tokenizer | None, prepared: PreparedChat, chunks: Sequence[Chunk]
) -> dict[str, Any]:
    """The `chat.completion` object; one finished chunk per choice. Raises what `serve.errors.ended` does."""
    usage = UsageCount(cache_report=header.cache_report)
    choices = []
    for chunk in chunks:
        parser = prepared.new_parser()
        message = prepared.message(chunk, parser)
        usage.note(0, chunk.index, chunk.usage)
        usage.note_reasoning(0, chunk.index, parser.num_reasoning_tokens)
        finish = ended(chunk.finish)
        choices.append(
            {
                "index": chunk.index,
                "message": _message(message),
                "logprobs": chat_logprobs(chunk.logprobs, tokenizer, as_ids=prepared.logprobs_as_ids)
                if chunk.logprobs and tokenizer
                else None,
                "finish_reason": prepared.finish_kind(finish, parser),
                "matched_stop": finish.matched,
            }
        )
    return header.whole("chat.completion", choices, usage.total())


def _message(message: AssistantMessage) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]
    return {
        "role": "assistant",
        "content": message.content if calls else message.content or "",
        "reasoning_content": message.reasoning,
        "tool_calls": calls or None,
    }


class ChatEvents:
    """Events of one streamed chat answer (see serve.sse.Encoder).

    Per choice: a delta with the role, then deltas with reasoning, content and tool calls. When all choices have
    ended: a finish per choice, and the usage if it was asked for.
    """

    def __init__(
        self,
        header: AnswerHeader,
        tokenizer: Tokenizer | None,
        prepared: PreparedChat,
        options: StreamOptions | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._prepared = prepared
        self._options = options or StreamOptions()
        self._usage = UsageCount(cache_report=header.cache_report)
        self._finishes: dict[int, Finish] = {}
        self._start = header.event_start("chat.completion.chunk")
        self._end = event_end()
        self._before_text: dict[int, bytes] = {}
        self._after_text = self._choice_rest(logprobs=b"null")
        self._parses = prepared.parses
        self._parsers: dict[int, OutputParser] = {}

    def events(self, request_index: int, chunks: Sequence[Chunk]) -> bytes:
        parts: list[bytes] = []
        for chunk in chunks:
            index = chunk.index
            before = self._before_text.get(index)
            if before is None:
                before = self._before_text[index] = self._open(index)
                nothing_yet = chunk._replace(usage=chunk.usage._replace(output=0))
                parts.append(self._delta(index, {"role": "assistant", "content": ""}, nothing_yet))
            self._usage.note(0, index, chunk.usage)
            if chunk.finish is not None:
                self._finishes[index] = chunk.finish
            if self._parses:
                parts += self._parsed(chunk)
                continue
            if chunk.logprobs is not None:
                rest = self._choice_rest(logprobs=self._logprobs(chunk))
            elif chunk.text:
                rest = self._after_text
            else:
                continue
            parts += (before, orjson.dumps(chunk.text), rest, self._event_end(chunk))
        return b"".join(parts)

    def closing(self) -> bytes:
        """Raises what `serve.errors.ended` does, after all text was sent."""
        for finish in self._finishes.values():
            ended(finish)
        parts = [self._delta(index, {}, None, finish) for index, finish in sorted(self._finishes.items())]
        if self._options.include_usage:
            parts.append(self._start + event_end(self._usage.total()))
        return b"".join(parts)

    # --- outputs that are parsed ---

    def _parser(self, index: int) -> OutputParser:
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._prepared.new_parser()
        return parser

    def _parsed(self, chunk: Chunk) -> list[bytes]:
        """The events for one chunk. Its logprobs stand in the first of them."""
        parser = self._parser(chunk.index)
        found = parser.feed_chunk(chunk)
        self._usage.note_reasoning(0, chunk.index, parser.num_reasoning_tokens)
        parts: list[bytes] = []
        logprobs = self._logprobs(chunk)
        if chunk.logprobs is not None and not found:
            found = [Content("")]
        for event in found:
            rest = b',"logprobs":' + logprobs + b',"finish_reason":null,"matched_stop":null}'
            logprobs = b"null"
            parts += (self._start, b'{"index":%d,"delta":' % chunk.index, _delta_of(event), rest)
            parts.append(self._event_end(chunk))
        return parts

    # --- pieces of events ---

    def _logprobs(self, chunk: Chunk) -> bytes:
        if chunk.logprobs is None or self._tokenizer is None:
            return b"null"
        return orjson.dumps(
            chat_logprobs(chunk.logprobs, self._tokenizer, as_ids=self._prepared.logprobs_as_ids)
        )

    def _open(self, index: int) -> bytes:
        """An event of one choice up to its text."""
        return self._start + b'{"index":%d,"delta":{"role":null,"content":' % index

    def _choice_rest(self, *, logprobs: bytes) -> bytes:
        return (
            b',"reasoning_content":null,"tool_calls":null},"logprobs":'
            + logprobs
            + b',"finish_reason":null,"matched_stop":null}'
        )

    def _delta(
        self, index: int, delta: dict[str, Any], chunk: Chunk | None, finish: Finish | None = None
    ) -> bytes:
        """An event without text: the first or the last of a choice."""
        empty = {"role": None, "content": None, "reasoning_content": None, "tool_calls": None}
        choice = {
            "index": index,
            "delta": empty | delta,
            "logprobs": None,
            "finish_reason": self._prepared.finish_kind(finish, self._parser(index)) if finish else None,
            "matched_stop": finish.matched if finish else None,
        }
        return self._start + orjson.dumps(choice) + self._event_end(chunk)

    def _event_end(self, chunk: Chunk | None) -> bytes:
        if chunk is None or not self._options.in_every_event:
            return self._end
        return event_end(self._usage.so_far(0, chunk.index, chunk.usage))


def _delta_of(event: ChatEvent) -> bytes:
    """The `delta` of one event, as JSON."""
    match event:
        case Content(text):
            return (
                b'{"role":null,"content":'
                + orjson.dumps(text)
                + b',"reasoning_content":null,"tool_calls":null}'
            )
        case Reasoning(text):
            return (
                b'{"role":null,"content":null,"reasoning_content":'
                + orjson.dumps(text)
                + b',"tool_calls":null}'
            )
        case ToolCallStart(index, call_id, name):
            call: dict[str, Any] = {
                "index": index,
                "id": call_id,
                "type": "function",
                "function": {"name": name, "arguments": ""},
            }
        case ToolCallArguments(index, text):
            call = {"index": index, "function": {"arguments": text}}
    return b'{"role":null,"content":null,"reasoning_content":null,"tool_calls":[' + orjson.dumps(call) + b"]}"
