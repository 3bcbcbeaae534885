"""Answers of `/generate` and `Engine.generate`: dicts for complete answers, events for streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import orjson

from runtime.request import Chunk, Finish, Logprobs, Request
from serve.calls.hidden_states import hidden_states
from serve.calls.routed_experts import routed_experts

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore
    from runtime.actors.output_stream import OutputStream
    from runtime.actors.request_times import RequestTimes


TokenText = Callable[[int], str]


class GenerateAnswers:
    """Builds the answers of one call of `/generate` or `Engine.generate`.

    `indexed`: each event has the number of its choice, counted over all prompts. `incremental`: an event has only the
    new text and log-probabilities, instead of all since the start.
    """

    def __init__(
        self, core: EngineCore, requests: Sequence[Request], *, indexed: bool, incremental: bool = False
    ) -> None:
        self._requests = requests
        self._indexed = indexed
        self._incremental = incremental
        self._weight_version = core.plan.serve.weight_version
        self._token_text = core.tokenizer.token_text if core.tokenizer else None
        self._started_s = time.perf_counter()
        self._growing: dict[tuple[int, int], _Growing] = {}
        self._times: Sequence[RequestTimes | None] = ()

    def follow(self, streams: Sequence[OutputStream]) -> None:
        """Add these streams' predicted and measured times to first token to the `meta_info` of ended outputs."""
        self._times = [stream.times for stream in streams]

    def whole(self, answers: Sequence[Sequence[Chunk]]) -> list[dict[str, Any]]:
        """Return the complete answers, ordered by prompt and then by choice."""
        return [
            {
                "text": chunk.text,
                "output_ids": chunk.ids,
                "meta_info": self._meta(request, chunk) | self._first_token(at, chunk) | self._logprobs(request, chunk),
            }
            for at, (request, chunks) in enumerate(zip(self._requests, answers, strict=True))
            for chunk in chunks
        ]

    def embeddings(self, answers: Sequence[Sequence[Chunk]]) -> list[dict[str, Any]]:
        """Return the answers of embedding requests, one per prompt."""
        return [
            {"embedding": chunk.embedding, "meta_info": self._meta(request, chunk)}
            for request, chunks in zip(self._requests, answers, strict=True)
            for chunk in chunks
        ]

    # --- streaming: see serve.http.sse.Encoder ---

    def events(self, request_index: int, chunks: Sequence[Chunk]) -> bytes:
        return b"".join([self._event(request_index, chunk) for chunk in chunks])

    def closing(self) -> bytes:
        return b""

    def _event(self, request_index: int, chunk: Chunk) -> bytes:
        request = self._requests[request_index]
        growing = self._growing.get((request_index, chunk.index))
        if growing is None:
            tail = self._tail(request, request_index * request.sampling.n + chunk.index)
            growing = self._growing[request_index, chunk.index] = _Growing(tail)
        elif self._incremental:
            growing.clear()
        growing.add_text(chunk.text)
        if request.logprobs is not None:
            growing.add_lists(self._logprobs(request, chunk))
        usage = chunk.usage
        tail_fields = b""
        if chunk.finish is not None:
            tail_fields = b',"e2e_latency":%.6f' % (time.perf_counter() - self._started_s)
            if first_token := self._first_token(request_index, chunk):
                tail_fields += b"," + orjson.dumps(first_token)[1:-1]
        if usage.drafts is not None:
            tail_fields += b"," + orjson.dumps(usage.drafts.as_meta())[1:-1]
        return b'data: {"text":"%b","output_ids":%b,"meta_info":{"finish_reason":%b,%b%b%b,%b' % (
            growing.text,
            orjson.dumps(chunk.ids),
            b"null" if chunk.finish is None else orjson.dumps(finish_reason(chunk.finish)),
            b'"prompt_tokens":%d,"completion_tokens":%d,"cached_tokens":%d' % usage[:3],
            tail_fields,
            growing.lists_json(),
            growing.tail,
        )

    def _tail(self, request: Request, number: int) -> bytes:
        """Return the bytes with which each event of this choice ends: id, weight version and index."""
        names = orjson.dumps({"id": request.label, "weight_version": self._weight_version})[1:]
        index = b',"index":%d' % number if self._indexed else b""
        return names + index + b"}\n\n"

    # --- complete answers and events ---

    def _meta(self, request: Request, chunk: Chunk) -> dict[str, Any]:
        return {
            "id": request.label,
            "finish_reason": finish_reason(chunk.finish),
            "prompt_tokens": chunk.usage.prompt,
            "weight_version": self._weight_version,
            "completion_tokens": chunk.usage.output,
            "cached_tokens": chunk.usage.cached,
            "e2e_latency": time.perf_counter() - self._started_s,
            **({} if chunk.usage.drafts is None else chunk.usage.drafts.as_meta()),
            **({"hidden_states": hidden_states(chunk)} if request.returns_hidden else {}),
            **({"routed_experts": routed_experts(chunk)} if request.experts_from is not None else {}),
        }

    def _first_token(self, number: int, chunk: Chunk) -> dict[str, float]:
        """Return the measured and the predicted time to first token, in seconds, if the output has ended."""
        times = self._times[number] if number < len(self._times) else None
        if times is None or chunk.finish is None or not times.first_token:
            return {}
        values = {"first_token_latency": times.first_token - times.arrived}
        if times.predicted_first_token_s:
            values["predicted_first_token_latency"] = times.predicted_first_token_s
        return values

    def _logprobs(self, request: Request, chunk: Chunk) -> dict[str, list[Any]]:
        params = request.logprobs
        if params is None:
            return {}
        text = self._token_text if params.text else None
        lists: dict[str, list[Any]] = {}
        for side, logprobs in (("input", chunk.prompt_logprobs), ("output", chunk.logprobs)):
            values = logprobs or Logprobs([], [], [])
            lists[f"{side}_token_logprobs"] = _entries(values.chosen, text)
            if params.top:
                lists[f"{side}_top_logprobs"] = [_optional(pairs, text) for pairs in values.top]
            if params.token_ids:
                lists[f"{side}_token_ids_logprobs"] = [_optional(pairs, text) for pairs in values.requested]
        return lists


def finish_reason(finish: Finish | None) -> dict[str, Any] | None:
    """Return the `finish_reason` of `meta_info`."""
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
    """The text and lists of one choice so far, which each event repeats with new items at the end.

    They are stored as JSON, so that each item is serialized only once.
    """

    __slots__ = ("lists", "tail", "text")

    def __init__(self, tail: bytes) -> None:
        self.tail = tail
        self.text = bytearray()  # a JSON string without its quotes
        self.lists: dict[str, bytearray] = {}  # JSON lists without their brackets

    def clear(self) -> None:
        """Remove all text and list items, but keep the names of the lists."""
        self.text.clear()
        for items in self.lists.values():
            items.clear()

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
