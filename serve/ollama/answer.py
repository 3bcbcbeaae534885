"""Build the answers of /api/chat and /api/generate: one JSON object, or a stream with one JSON object per line."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson

from runtime.actors.output_stream import OutputStream
from runtime.request import Chunk, Finish, Usage
from serve.calls.chat.events import ChatEvent
from serve.calls.chat.parts import Closed, Grown, Part, PartAssembler, PartEvent
from serve.calls.errors import ended
from serve.calls.logprobs import chat_logprobs
from serve.http.sse import Framing

if TYPE_CHECKING:
    from runtime.tokenizer.tokenizer import Tokenizer

FRAMING = Framing(content_type=b"application/x-ndjson", done=b"", ping=b"")

Wrap = Callable[[str, str | None, list[dict[str, Any]] | None], dict[str, Any]]


def in_message(text: str, thinking: str | None, calls: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Return the fields of an answer in the format of /api/chat, with a `message`."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def in_response(text: str, thinking: str | None, calls: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Return the fields of an answer in the format of /api/generate, with a `response` and without calls."""
    return {"response": text, "thinking": thinking} if thinking else {"response": text}


class Answer:
    """One answer, complete or as lines of a stream (see serve.http.sse.Encoder).

    `wrap(text, thinking, calls)` returns the fields of the route's format. `parse` converts a chunk to chat events. The
    answer reports two durations in nanoseconds: from the request to the first token, and from there to the end.
    """

    def __init__(
        self,
        model: str,
        wrap: Wrap,
        parse: Callable[[Chunk], Iterable[ChatEvent]],
        tokenizer: Tokenizer | None,
    ) -> None:
        self._model = model
        self._wrap = wrap
        self._parse = parse
        self._tokenizer = tokenizer
        self._parts = PartAssembler()
        self._begun_ns = time.perf_counter_ns()
        self._first_ns: int | None = None
        self._usage = Usage(0, 0, 0)
        self._finish: Finish | None = None

    # --- streams ---

    def events(self, request_index: int, chunks: Sequence[Chunk]) -> bytes:
        lines: list[dict[str, Any]] = []
        for chunk in chunks:
            of_chunk = _lines(self._wrap, self._read(chunk))
            logprobs = self._logprobs(chunk)
            if logprobs:
                of_chunk = of_chunk or [self._wrap("", None, None)]
                of_chunk[0]["logprobs"] = logprobs
            lines += of_chunk
        return self._written(lines)

    def closing(self) -> bytes:
        lines = _lines(self._wrap, self._parts.end())
        return self._written(lines) + orjson.dumps(self._last(self._wrap("", None, None))) + b"\n"

    def _written(self, lines: Sequence[dict[str, Any]]) -> bytes:
        if not lines:
            return b""
        head = {"model": self._model, "created_at": now()}
        return b"".join(orjson.dumps({**head, **line, "done": False}) + b"\n" for line in lines)

    # --- complete answers ---

    async def whole(self, stream: OutputStream) -> dict[str, Any]:
        """Return the answer as one object. The output is read as it arrives, to time the first token."""
        logprobs: list[dict[str, Any]] = []
        async with aclosing(stream.chunks()) as arrivals:
            async for chunks in arrivals:
                for chunk in chunks:
                    self._read(chunk)
                    logprobs += self._logprobs(chunk)
        parts = self._parts.parts
        calls = [call for part in parts if part.kind == "call" and (call := _call(part)) is not None]
        content = self._wrap(_text(parts, "text"), _text(parts, "reasoning"), calls)
        return self._last({**content, "logprobs": logprobs} if logprobs else content)

    def loaded(self) -> dict[str, Any]:
        """Return the answer to a request without a prompt, which in Ollama only loads the model."""
        content = self._wrap("", None, None)
        return {"model": self._model, "created_at": now(), **content, "done": True, "done_reason": "load"}

    # --- streams and complete answers ---

    def _read(self, chunk: Chunk) -> list[PartEvent]:
        if self._first_ns is None:
            self._first_ns = time.perf_counter_ns()
        self._usage = chunk.usage
        self._finish = chunk.finish or self._finish
        return self._parts.feed(self._parse(chunk))

    def _logprobs(self, chunk: Chunk) -> list[dict[str, Any]]:
        if chunk.logprobs is None or self._tokenizer is None:
            return []
        return chat_logprobs(chunk.logprobs, self._tokenizer)["content"]

    def _last(self, content: dict[str, Any]) -> dict[str, Any]:
        ended_ns = time.perf_counter_ns()
        first_ns = self._first_ns or ended_ns
        return {
            "model": self._model,
            "created_at": now(),
            **content,
            "done": True,
            "done_reason": ended(self._finish).kind,
            "total_duration": ended_ns - self._begun_ns,
            "load_duration": 0,  # the model is always loaded
            "prompt_eval_count": self._usage.prompt,
            "prompt_eval_duration": first_ns - self._begun_ns,
            "eval_count": self._usage.output,
            "eval_duration": ended_ns - first_ns,
        }


def now() -> str:
    """Return the current time in RFC 3339 format."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _lines(wrap: Wrap, events: Sequence[PartEvent]) -> list[dict[str, Any]]:
    """Return the lines for these events: text and reasoning as they arrive, and calls when they are complete."""
    lines: list[dict[str, Any]] = []
    for event in events:
        match event:
            case Grown(part, text) if part.kind == "text":
                lines.append(wrap(text, None, None))
            case Grown(part, text) if part.kind == "reasoning":
                lines.append(wrap("", text, None))
            case Closed(part) if part.kind == "call" and (call := _call(part)) is not None:
                lines.append(wrap("", None, [call]))
            case _:
                pass
    return lines


def _text(parts: Sequence[Part], kind: str) -> str:
    return "".join(part.text for part in parts if part.kind == kind)


def _call(part: Part) -> dict[str, Any] | None:
    """Return a complete call, or None if its arguments were truncated."""
    if (arguments := part.arguments) is None:
        return None
    return {"id": part.call_id, "function": {"name": part.name, "arguments": arguments}}
