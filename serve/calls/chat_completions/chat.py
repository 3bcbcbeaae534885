"""The answer of `/v1/chat/completions`, complete or as events."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import orjson

from runtime.request import Chunk, Finish
from serve.calls.chat.events import (
    AssistantMessage,
    ChatEvent,
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from serve.calls.chat.parser import OutputParser
from serve.calls.chat.prepare import PreparedChat
from serve.calls.chat_completions.answers import AnswerHeader, UsageCount, event_end
from serve.calls.chat_completions.schema import StreamOptions
from serve.calls.errors import ended
from serve.calls.hidden_states import last_hidden
from serve.calls.logprobs import chat_logprobs, prompt_logprobs, with_top
from serve.calls.routed_experts import routed_experts

if TYPE_CHECKING:
    from runtime.tokenizer.tokenizer import Tokenizer


def chat_answer(
    header: AnswerHeader, tokenizer: Tokenizer | None, prepared: PreparedChat, chunks: Sequence[Chunk]
) -> dict[str, Any]:
    """Return the `chat.completion` object, from one finished chunk per choice.

    Raises `Aborted` or `EngineFailure` if an answer is incomplete.
    """
    usage = UsageCount(cache_report=header.cache_report)
    choices: list[dict[str, Any]] = []
    whole: dict[str, Any] = {}
    for chunk in chunks:
        parser = prepared.new_parser()
        message = prepared.message(chunk, parser)
        usage.note(0, chunk.index, chunk.usage)
        usage.note_reasoning(0, chunk.index, parser.num_reasoning_tokens)
        finish = ended(chunk.finish)
        choices.append(
            {
                "index": chunk.index,
                "message": _message(message, legacy=prepared.legacy_calls),
                "logprobs": _logprobs(tokenizer, prepared, chunk),
                "finish_reason": prepared.finish_kind(finish, parser),
                "matched_stop": finish.matched,
            }
        )
        if prepared.request.returns_hidden:
            choices[-1]["hidden_states"] = last_hidden(chunk)
        if prepared.request.experts_from is not None:
            choices[-1]["sgl_ext"] = {"routed_experts": routed_experts(chunk)}
        if prepared.request.returns_ids:
            choices[-1]["token_ids"] = chunk.ids
            whole["prompt_token_ids"] = chunk.prompt_ids
        if prepared.prompt_logprobs is not None and tokenizer is not None and chunk.prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(chunk.prompt_logprobs, tokenizer, prepared.prompt_logprobs)
    return header.whole("chat.completion", choices, usage.total()) | whole


def _logprobs(tokenizer: Tokenizer | None, prepared: PreparedChat, chunk: Chunk) -> dict[str, Any] | None:
    if chunk.logprobs is None or tokenizer is None or prepared.top_logprobs is None:
        return None
    shown = with_top(chunk.logprobs, prepared.top_logprobs)
    return chat_logprobs(shown, tokenizer, as_ids=prepared.logprobs_as_ids)


def _message(message: AssistantMessage, *, legacy: bool = False) -> dict[str, Any]:
    if legacy and message.tool_calls:  # the older form has only one call
        [call, *_] = message.tool_calls
        called = {"name": call.name, "arguments": call.arguments}
        return _message(replace(message, tool_calls=[])) | {"content": message.content, "function_call": called}
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
    """Events of one streamed chat answer (see serve.http.sse.Encoder).

    The first event of a choice has the role. Events with reasoning, content and tool calls follow. After all choices
    have ended, there is one event per choice with the finish reason, and then an event with the usage if the request
    asks for it.
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
        self._last: dict[int, Chunk] = {}  # the last chunk of each choice
        self._start = header.event_start("chat.completion.chunk")
        self._end = event_end()
        self._before_text: dict[int, bytes] = {}
        self._after_text = self._choice_rest(logprobs=b"null")
        self._parses = prepared.parses
        self._returns_ids = prepared.request.returns_ids
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
                if chunk.prompt_ids is not None:
                    ids = orjson.dumps(chunk.prompt_ids)
                    parts[-1] = parts[-1].removesuffix(b"}\n\n") + b',"prompt_token_ids":' + ids + b"}\n\n"
            self._usage.note(0, index, chunk.usage)
            if chunk.finish is not None:
                self._last[index] = chunk
            if self._parses:
                parts += self._parsed(chunk)
                continue
            if chunk.logprobs is not None or self._returns_ids:
                rest = self._choice_rest(logprobs=self._logprobs(chunk), ids=self._ids(chunk))
            elif chunk.text:
                rest = self._after_text
            else:
                continue
            parts += (before, orjson.dumps(chunk.text), rest, self._event_end(chunk))
        return b"".join(parts)

    def closing(self) -> bytes:
        """Return the last events, after all text has been sent.

        Raises `Aborted` or `EngineFailure` if an answer is incomplete.
        """
        for chunk in self._last.values():
            ended(chunk.finish)
        parts = [self._delta(index, {}, chunk, chunk.finish) for index, chunk in sorted(self._last.items())]
        if self._options.include_usage:
            parts.append(self._start + event_end(self._usage.total()))
        return b"".join(parts)

    # --- parsed outputs ---

    def _parser(self, index: int) -> OutputParser:
        parser = self._parsers.get(index)
        if parser is None:
            parser = self._parsers[index] = self._prepared.new_parser()
        return parser

    def _parsed(self, chunk: Chunk) -> list[bytes]:
        """Return the events for one chunk. The first event carries the chunk's log-probabilities and token ids."""
        parser = self._parser(chunk.index)
        events = parser.feed_chunk(chunk)
        self._usage.note_reasoning(0, chunk.index, parser.num_reasoning_tokens)
        parts: list[bytes] = []
        logprobs = self._logprobs(chunk)
        if not events and (chunk.logprobs is not None or self._returns_ids):
            events = [Content("")]
        ids = self._ids(chunk)
        for event in events:
            rest = b',"logprobs":' + logprobs + b',"finish_reason":null,"matched_stop":null' + ids + b"}"
            logprobs, ids = b"null", b""
            delta = _legacy_delta_of(event) if self._prepared.legacy_calls else _delta_of(event)
            parts += (self._start, b'{"index":%d,"delta":' % chunk.index, delta, rest)
            parts.append(self._event_end(chunk))
        return parts

    # --- parts of events ---

    def _logprobs(self, chunk: Chunk) -> bytes:
        return orjson.dumps(_logprobs(self._tokenizer, self._prepared, chunk))

    def _ids(self, chunk: Chunk) -> bytes:
        """Return the JSON field with the chunk's token ids, or nothing if the request does not want them."""
        return b',"token_ids":' + orjson.dumps(chunk.ids) if self._returns_ids else b""

    def _open(self, index: int) -> bytes:
        """Return the bytes of an event up to the text of its choice."""
        return self._start + b'{"index":%d,"delta":{"role":null,"content":' % index

    def _choice_rest(self, *, logprobs: bytes, ids: bytes = b"") -> bytes:
        return (
            b',"reasoning_content":null,"tool_calls":null},"logprobs":'
            + logprobs
            + b',"finish_reason":null,"matched_stop":null'
            + ids
            + b"}"
        )

    def _delta(self, index: int, delta: dict[str, Any], chunk: Chunk | None, finish: Finish | None = None) -> bytes:
        """Return an event without text: the first or the last event of a choice."""
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


def _legacy_delta_of(event: ChatEvent) -> bytes:
    """Return the `delta` of one event as JSON, in the older form `function_call`, which has only one call."""
    match event:
        case ToolCallStart(0, _, name):
            called = {"name": name, "arguments": ""}
        case ToolCallArguments(0, text):
            called = {"arguments": text}
        case ToolCallStart() | ToolCallArguments():
            return _delta_of(Content(""))
        case _:
            return _delta_of(event)
    return b'{"role":null,"content":null,"function_call":' + orjson.dumps(called) + b"}"


def _delta_of(event: ChatEvent) -> bytes:
    """Return the `delta` of one event as JSON."""
    match event:
        case Content(text):
            return b'{"role":null,"content":' + orjson.dumps(text) + b',"reasoning_content":null,"tool_calls":null}'
        case Reasoning(text):
            return b'{"role":null,"content":null,"reasoning_content":' + orjson.dumps(text) + b',"tool_calls":null}'
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
