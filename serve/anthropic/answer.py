"""Build the answers of /v1/messages, complete or as a stream of events.

A stream has message_start; then content_block_start, content_block_delta and content_block_stop of each block; then
message_delta and message_stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runtime.errors import EngineFailure, RequestError
from runtime.request import Chunk, Finish, Usage
from serve.anthropic.errors import error_event, event
from serve.calls.chat.parts import Closed, Grown, Opened, Part, PartAssembler, PartEvent, parts_of
from serve.calls.chat.prepare import PreparedChat
from serve.calls.errors import ended
from serve.http.errors import describe
from serve.http.sse import Framing

SIGNATURE = "penstock"  # constant signature of thinking blocks; clients send back only blocks with a signature
FRAMING = Framing(done=b"", ping=event("ping", {"type": "ping"}))
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def message_answer(prepared: PreparedChat, chunk: Chunk, model: str) -> dict[str, Any]:
    """Return the `message` object of a complete answer. Raises `Aborted` or `EngineFailure` if it is incomplete."""
    parser = prepared.new_parser()
    parts = parts_of(parser.feed_chunk(chunk))
    finish = ended(chunk.finish)
    blocks = [_block(part) for part in parts]
    return {
        **_opening(prepared, model),
        "content": [block for block in blocks if block is not None],
        "stop_reason": _stop_reason(prepared, finish, prepared.finish_kind(finish, parser), chunk.usage),
        "stop_sequence": _stop_sequence(finish),
        "usage": _usage(chunk.usage, parser.num_reasoning_tokens),
    }


def _opening(prepared: PreparedChat, model: str) -> dict[str, Any]:
    return {
        "id": prepared.request.label,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _block(part: Part) -> dict[str, Any] | None:
    """Return a complete part as a content block, or None for a call with truncated arguments."""
    if part.kind == "text":
        return {"type": "text", "text": part.text, "citations": None}
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": SIGNATURE}
    if (arguments := part.arguments) is None:
        return None
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": arguments}


def _stop_reason(prepared: PreparedChat, finish: Finish, kind: str, usage: Usage) -> str:
    if kind == "tool_calls":
        return "tool_use"
    if kind == "length":
        limit = prepared.request.sampling.max_new_tokens
        is_truncated = limit is not None and usage.output < limit
        return "model_context_window_exceeded" if is_truncated else "max_tokens"
    return "end_turn" if _stop_sequence(finish) is None else "stop_sequence"


def _stop_sequence(finish: Finish) -> str | None:
    return finish.matched if finish.kind == "stop" and isinstance(finish.matched, str) else None


def _usage(usage: Usage, num_reasoning: int) -> dict[str, Any]:
    """Return the token counts. `input_tokens` are the prompt tokens that were computed.

    `cache_read_input_tokens` are the prompt tokens from the prefix cache.
    """
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.output,
        "output_tokens_details": {"thinking_tokens": num_reasoning},
    }


class MessageEvents:
    """Events of one streamed answer (see serve.http.sse.Encoder)."""

    def __init__(self, prepared: PreparedChat, model: str) -> None:
        self._prepared = prepared
        self._model = model
        self._parser = prepared.new_parser()
        self._parts = PartAssembler()
        self._usage: Usage | None = None
        self._last_finish: Finish | None = None

    def events(self, request_index: int, chunks: Sequence[Chunk]) -> bytes:
        written: list[bytes] = []
        for chunk in chunks:
            if self._usage is None:
                written.append(self._start(chunk.usage))
            self._usage = chunk.usage
            self._last_finish = chunk.finish or self._last_finish
            written += map(_part_event, self._parts.feed(self._parser.feed_chunk(chunk)))
        return b"".join(written)

    def closing(self) -> bytes:
        written = [_part_event(part_event) for part_event in self._parts.end()]
        try:
            finish = ended(self._last_finish)
        except (RequestError, EngineFailure) as error:
            return b"".join([*written, error_event(describe(error))])
        kind = self._prepared.finish_kind(finish, self._parser)
        last_usage = self._usage or Usage(0, 0, 0)
        reason = _stop_reason(self._prepared, finish, kind, last_usage)
        delta = {"stop_reason": reason, "stop_sequence": _stop_sequence(finish)}
        usage = _usage(last_usage, self._parser.num_reasoning_tokens)
        written.append(event("message_delta", {"type": "message_delta", "delta": delta, "usage": usage}))
        written.append(event("message_stop", {"type": "message_stop"}))
        return b"".join(written)

    def _start(self, usage: Usage) -> bytes:
        message = {**_opening(self._prepared, self._model), "usage": _usage(usage._replace(output=0), 0)}
        return event("message_start", {"type": "message_start", "message": message})


def _part_event(part_event: PartEvent) -> bytes:
    index = part_event.part.index
    match part_event:
        case Opened(part):
            data = {"type": "content_block_start", "index": index, "content_block": _empty_block(part)}
            return event("content_block_start", data)
        case Grown(part, text):
            return _delta(index, *_DELTAS[part.kind], text)
        case Closed(part):
            stop = event("content_block_stop", {"type": "content_block_stop", "index": index})
            if part.kind == "reasoning":
                return _delta(index, "signature_delta", "signature", SIGNATURE) + stop
            return stop


def _empty_block(part: Part) -> dict[str, Any]:
    match part.kind:
        case "text":
            return {"type": "text", "text": ""}
        case "reasoning":
            return {"type": "thinking", "thinking": "", "signature": ""}
        case "call":
            return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}


def _delta(index: int, kind: str, key: str, text: str) -> bytes:
    data = {"type": "content_block_delta", "index": index, "delta": {"type": kind, key: text}}
    return event("content_block_delta", data)
