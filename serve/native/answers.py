"""What `/generate` answers: dicts when it is whole, events when it streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import orjson

from runtime.request import Chunk, Finish, Logprobs, Request

TokenText = Callable[[int], str]


class Answers:
    """Makes the answers of one call to `/generate`."""

    def __init__(
        self, requests: Sequence[Request], *, indexed: bool, weight_version: str, token_text: TokenText | None
    ) -> None:
        self._requests = requests
        self._indexed = indexed
        self._weight_version = weight_version
        self._token_text = token_text
        self._started_s = time.perf_counter()
        self._growing: dict[tuple[int, int], _Growing] = {}

    def whole(self, answers: Sequence[Sequence[Chunk]]) -> list[dict[str, Any]]:
        """Prompt by prompt, choice by choice."""
        return [
            {
                "text": chunk.text,
                "output_ids": chunk.ids,
                "meta_info": self._meta(request, chunk) | self._logprobs(request, chunk),
            }
            for request, chunks in zip(self._requests, answers, strict=True)
            for chunk in chunks
        ]

    # --- streaming: see serve.sse.Encoder ---

    def events(self, place: int, chunks: Sequence[Chunk]) -> bytes:
        return b"".join([self._event(place, chunk) for chunk in chunks])

    def closing(self) -> bytes:
        return b""

    def _event(self, place: int, chunk: Chunk) -> bytes:
        request = self._requests[place]
        growing = self._growing.get((place, chunk.index))
        if growing is None:
            growing = self._growing[place, chunk.index] = _Growing(self._tail(request, place, chunk.index))
        growing.add_text(chunk.text)
        if request.logprobs is not None:
            growing.add_lists(self._logprobs(request, chunk))
        usage = chunk.usage
        late = b""
        if chunk.finish is not None:
            late = b',"e2e_latency":%.6f' % (time.perf_counter() - self._started_s)
        return b'data: {"text":"%b","output_ids":%b,"meta_info":{"finish_reason":%b,%b%b%b,%b' % (
            growing.text,
            orjson.dumps(chunk.ids),
            b"null" if chunk.finish is None else orjson.dumps(finish_reason(chunk.finish)),
            b'"prompt_tokens":%d,"completion_tokens":%d,"cached_tokens":%d' % usage,
            late,
            growing.lists_json(),
            growing.tail,
        )

    def _tail(self, request: Request, place: int, index: int) -> bytes:
        """The end of every event of one choice."""
        names = orjson.dumps({"id": request.label, "weight_version": self._weight_version})[1:]
        number = b',"index":%d' % (place * request.sampling.n + index) if self._indexed else b""
        return names + number + b"}\n\n"

    # --- both ---

    def _meta(self, request: Request, chunk: Chunk) -> dict[str, Any]:
        return {
            "id": request.label,
            "finish_reason": finish_reason(chunk.finish),
            "prompt_tokens": chunk.usage.prompt,
            "weight_version": self._weight_version,
            "completion_tokens": chunk.usage.output,
            "cached_tokens": chunk.usage.cached,
            "e2e_latency": time.perf_counter() - self._started_s,
        }

    def _logprobs(self, request: Request, chunk: Chunk) -> dict[str, list[Any]]:
        wanted = request.logprobs
        if wanted is None:
            return {}
        text = self._token_text if wanted.text else None
        lists: dict[str, list[Any]] = {}
        for side, logprobs in (("input", chunk.prompt_logprobs), ("output", chunk.logprobs)):
            found = logprobs or Logprobs([], [], [])
            lists[f"{side}_token_logprobs"] = _entries(found.chosen, text)
            if wanted.top:
                lists[f"{side}_top_logprobs"] = [_optional(pairs, text) for pairs in found.top]
            if wanted.token_ids:
                lists[f"{side}_token_ids_logprobs"] = [_optional(pairs, text) for pairs in found.picked]
        return lists


def finish_reason(finish: Finish | None) -> dict[str, Any] | None:
    """As `meta_info` says it."""
    if finish is None:
        return None
    if finish.kind == "stop":
        return {"type": "stop", "matched": finish.matched}
    if finish.kind == "length":
        return {"type": "length", "length": finish.length}
    message = finish.message or "Aborted."
    return {"type": "abort", "message": message, "status_code": None, "err_type": None}


def _entries(pairs: Iterable[tuple[float | None, int]], text: TokenText | None) -> list[list[Any]]:
    return [[logprob, token_id, text(token_id) if text else None] for logprob, token_id in pairs]


def _optional(pairs: Sequence[tuple[float, int]] | None, text: TokenText | None) -> list[list[Any]] | None:
    return None if pairs is None else _entries(pairs, text)


class _Growing:
    """What the events of one choice repeat and extend, kept as JSON so that nothing is written twice."""

    __slots__ = ("lists", "tail", "text")

    def __init__(self, tail: bytes) -> None:
        self.tail = tail
        self.text = bytearray()  # a JSON string without its quotes
        self.lists: dict[str, bytearray] = {}  # JSON lists without their brackets

    def add_text(self, text: str) -> None:
        self.text += orjson.dumps(text)[1:-1]

    def add_lists(self, lists: dict[str, list[Any]]) -> None:
        for name, items in lists.items():
            grown = self.lists.setdefault(name, bytearray())
            if items:
                if grown:
                    grown += b","
                grown += orjson.dumps(items)[1:-1]

    def lists_json(self) -> bytes:
        return b"".join([b',"%b":[%b]' % (name.encode(), items) for name, items in self.lists.items()])
