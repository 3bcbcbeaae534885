"""Completion answers: a text per choice when whole, pieces of it when streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import orjson

from runtime.request import Chunk, Finish, Logprobs, Request
from serve.openai.answers import Head, event_end
from serve.openai.logprobs import CompletionLogprobs
from serve.openai.schema import StreamOptions
from serve.openai.usage import UsageCount

if TYPE_CHECKING:
    from runtime.tokenizer.tokenizer import Tokenizer

KIND = "text_completion"


class CompletionAnswers:
    """Makes the answer of one call. Choices are numbered prompt by prompt: place * n + index.

    `echoes` are the prompts' texts when the answer repeats them.
    """

    def __init__(
        self,
        head: Head,
        tokenizer: Tokenizer | None,
        requests: Sequence[Request],
        *,
        echoes: Sequence[str] | None,
        options: StreamOptions | None,
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._requests = requests
        self._echoes = echoes
        self._options = options or StreamOptions()
        self._usage = UsageCount(cache_report=head.cache_report)
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._start = head.event_start(KIND)
        self._end = event_end()
        self._before_text: dict[int, bytes] = {}

    def whole(self, answers: Sequence[Sequence[Chunk]]) -> dict[str, Any]:
        """The `text_completion` object; one finished chunk per choice."""
        choices = []
        for place, chunks in enumerate(answers):
            for chunk in chunks:
                number, text = self._number(place, chunk), self._echo(place) + chunk.text
                self._usage.note(place, chunk.index, chunk.usage)
                finish = chunk.finish or Finish("abort")
                choices.append(
                    {
                        "index": number,
                        "text": text,
                        "logprobs": self._piece(place, number, chunk, text),
                        "finish_reason": finish.kind,
                        "matched_stop": finish.matched,
                    }
                )
        return self._head.whole(KIND, choices, self._usage.total())

    # --- streaming: see serve.sse.Encoder ---

    def events(self, place: int, chunks: Sequence[Chunk]) -> bytes:
        parts: list[bytes] = []
        for chunk in chunks:
            number, text = self._number(place, chunk), chunk.text
            before = self._before_text.get(number)
            if before is None:
                before = self._before_text[number] = self._start + b'{"index":%d,"text":' % number
                text = self._echo(place) + text
            self._usage.note(place, chunk.index, chunk.usage)
            if not text and chunk.finish is None and chunk.logprobs is None:
                continue
            parts += (
                before,
                orjson.dumps(text),
                self._rest(place, number, chunk, text),
                self._event_end(chunk),
            )
        return b"".join(parts)

    def closing(self) -> bytes:
        return self._start + event_end(self._usage.total()) if self._options.include_usage else b""

    def _rest(self, place: int, number: int, chunk: Chunk, text: str) -> bytes:
        """A choice from the end of its text."""
        if chunk.finish is None and chunk.logprobs is None:
            return b',"logprobs":null,"finish_reason":null,"matched_stop":null}'
        finish = chunk.finish
        fields = {
            "logprobs": self._piece(place, number, chunk, text),
            "finish_reason": finish.kind if finish else None,
            "matched_stop": finish.matched if finish else None,
        }
        return b"," + orjson.dumps(fields)[1:]

    def _event_end(self, chunk: Chunk) -> bytes:
        if self._options.continuous_usage_stats:
            return event_end(self._usage.so_far(chunk.usage))
        return self._end

    # --- both ---

    def _number(self, place: int, chunk: Chunk) -> int:
        return place * self._requests[place].sampling.n + chunk.index

    def _echo(self, place: int) -> str:
        return self._echoes[place] if self._echoes is not None else ""

    def _piece(self, place: int, number: int, chunk: Chunk, text: str) -> dict[str, Any] | None:
        """The logprobs object for the tokens of `text`, those of an echoed prompt included."""
        request, tokenizer = self._requests[place], self._tokenizer
        if request.logprobs is None or tokenizer is None:
            return None
        pieces = self._logprobs.get(number)
        if pieces is None:
            pieces = self._logprobs[number] = CompletionLogprobs(
                tokenizer,
                top=request.logprobs.top,
                skip_special_tokens=request.sampling.skip_special_tokens,
            )
        return pieces.piece(_joined(chunk.prompt_logprobs, chunk.logprobs), text)


def _joined(prompt: Logprobs | None, output: Logprobs | None) -> Logprobs:
    empty = Logprobs([], [], [])
    first, second = prompt or empty, output or empty
    return Logprobs(first.chosen + second.chosen, first.top + second.top, first.picked + second.picked)
