"""Chat answers: a message per choice when whole, deltas when streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

from runtime.request import Chunk, Finish
from serve.openai.answers import Head, event_end
from serve.openai.logprobs import chat_logprobs
from serve.openai.schema import StreamOptions
from serve.openai.usage import UsageCount

if TYPE_CHECKING:
    from runtime.tokenizer.tokenizer import Tokenizer


def chat_answer(head: Head, tokenizer: Tokenizer | None, chunks: Sequence[Chunk]) -> dict[str, Any]:
    """The `chat.completion` object; one finished chunk per choice."""
    usage = UsageCount(cache_report=head.cache_report)
    choices = []
    for chunk in chunks:
        usage.note(0, chunk.index, chunk.usage)
        finish = chunk.finish or Finish("abort")
        message = {
            "role": "assistant",
            "content": chunk.text,
            "reasoning_content": None,
            "tool_calls": None,
        }
        choices.append(
            {
                "index": chunk.index,
                "message": message,
                "logprobs": chat_logprobs(chunk.logprobs, tokenizer)
                if chunk.logprobs and tokenizer
                else None,
                "finish_reason": finish.kind,
                "matched_stop": finish.matched,
            }
        )
    return head.whole("chat.completion", choices, usage.total())


class ChatEvents:
    """Events of one streamed chat answer (see serve.sse.Encoder).

    Per choice: a delta with the role, then deltas with content. When all choices have ended: a finish per
    choice, and the usage if it was asked for.
    """

    def __init__(self, head: Head, tokenizer: Tokenizer | None, options: StreamOptions | None) -> None:
        self._tokenizer = tokenizer
        self._options = options or StreamOptions()
        self._usage = UsageCount(cache_report=head.cache_report)
        self._finishes: dict[int, Finish] = {}
        self._start = head.event_start("chat.completion.chunk")
        self._end = event_end()
        self._before_text: dict[int, bytes] = {}
        self._after_text = self._choice_rest(logprobs=b"null")

    def events(self, place: int, chunks: Sequence[Chunk]) -> bytes:
        parts: list[bytes] = []
        for chunk in chunks:
            index = chunk.index
            before = self._before_text.get(index)
            if before is None:
                before = self._before_text[index] = self._open(index)
                parts.append(self._delta(index, {"role": "assistant", "content": ""}, chunk))
            self._usage.note(0, index, chunk.usage)
            if chunk.finish is not None:
                self._finishes[index] = chunk.finish
            if chunk.logprobs is not None and self._tokenizer is not None:
                logprobs = orjson.dumps(chat_logprobs(chunk.logprobs, self._tokenizer))
                rest = self._choice_rest(logprobs=logprobs)
            elif chunk.text:
                rest = self._after_text
            else:
                continue
            parts += (before, orjson.dumps(chunk.text), rest, self._event_end(chunk))
        return b"".join(parts)

    def closing(self) -> bytes:
        parts = [self._delta(index, {}, None, finish) for index, finish in sorted(self._finishes.items())]
        if self._options.include_usage:
            parts.append(self._start + event_end(self._usage.total()))
        return b"".join(parts)

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
            "finish_reason": finish.kind if finish else None,
            "matched_stop": finish.matched if finish else None,
        }
        return self._start + orjson.dumps(choice) + self._event_end(chunk)

    def _event_end(self, chunk: Chunk | None) -> bytes:
        if chunk is None or not self._options.continuous_usage_stats:
            return self._end
        return event_end(self._usage.so_far(chunk.usage))
