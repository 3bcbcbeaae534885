"""Answers of /api/chat and /api/generate: one JSON object, or one a line as they are streamed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson

from runtime.actors.output_stream import OutputStream
from runtime.request import Chunk, Finish, Usage
from serve.chat.events import ChatEvent
from serve.chat.parts import Closed, Grown, Part, PartAssembler, PartEvent
from serve.errors import ended
from serve.openai.logprobs import chat_logprobs
from serve.sse import Framing

if TYPE_CHECKING:
    from runtime.tokenizer.tokenizer import Tokenizer

FRAMING = Framing(content_type=b"application/x-ndjson", done=b"", ping=b"")

Wrap = Callable[[str, str | None, list[dict[str, Any]] | None], dict[str, Any]]


def in_message(text: str, thinking: str | None, calls: list[dict[str, Any]] | None) -> dict[str, Any]:
    """What /api/chat says, in a `message`."""
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    return {"message": message}


def in_response(text: str, thinking: str | None, calls: list[dict[str, Any]] | None) -> dict[str, Any]:
    """What /api/generate says, in `response`; it takes no tools."""
    return {"response": text, "thinking": thinking} if thinking else {"response": text}


class Answer:
    """One answer, whole or as lines (see serve.sse.Encoder).

    `wrap` puts text, thinking and calls into the route's form; `parse` reads the output. Durations are measured
    here, in nanoseconds: until the first token, and from there on.
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

    # --- streamed ---

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

    # --- whole ---

    async def whole(self, stream: OutputStream) -> dict[str, Any]:
        """The answer as one object. The output is read as it comes: when the first token came is told, too."""
        logprobs: list[dict[str, Any]] = []
        async with aclosing(stream.chunks()) as arrivals:
            async for chunks in arrivals:
                for chunk in chunks:
                    self._read(chunk)
                    logprobs += self._logprobs(chunk)
        parts = self._parts.parts
        calls = [call for part in parts if part.kind == "call" and (call := _call(part)) is not None]
        said = self._wrap(_text(parts, "text"), _text(parts, "reasoning"), calls)
        return self._last({**said, "logprobs": logprobs} if logprobs else said)

    def loaded(self) -> dict[str, Any]:
        """The answer where nothing was asked but to load the model."""
        said = self._wrap("", None, None)
        return {"model": self._model, "created_at": now(), **said, "done": True, "done_reason": "load"}

    # --- both ---

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

    def _last(self, said: dict[str, Any]) -> dict[str, Any]:
        ended_ns = time.perf_counter_ns()
        first_ns = self._first_ns or ended_ns
        return {
            "model": self._model,
            "created_at": now(),
            **said,
            "done": True,
            "done_reason": ended(self._finish).kind,
            "total_duration": ended_ns - self._begun_ns,
            "load_duration": 0,  # it was loaded before
            "prompt_eval_count": self._usage.prompt,
            "prompt_eval_duration": first_ns - self._begun_ns,
            "eval_count": self._usage.output,
            "eval_duration": ended_ns - first_ns,
        }


def now() -> str:
    """The time as RFC 3339 writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _lines(wrap: Wrap, events: Sequence[PartEvent]) -> list[dict[str, Any]]:
    """What these events say: text and thinking as they grow, calls when they are complete."""
    lines: list[dict[str, Any]] = []
    for found in events:
        match found:
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
    """A whole call; None where its arguments were cut off."""
    try:
        arguments = orjson.loads(part.text or "{}")
    except orjson.JSONDecodeError:
        return None
    if not isinstance(arguments, dict):
        return None
    return {"id": part.call_id, "function": {"name": part.name, "arguments": arguments}}
