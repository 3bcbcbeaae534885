"""From the pieces of a response to what was observed: when each token came, how many, what failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import orjson

from serve.bench.client import Piece, Response
from serve.bench.metrics import Outcome
from serve.bench.protocol import Backend
from serve.bench.workload import Prompt

MAX_ERROR_CHARS = 200
DONE = b"[DONE]"


class StreamError(Exception):
    """The response is not the stream of events that was asked for."""


class Stamped(NamedTuple):
    """The data of one server-sent event, and when its last byte was read."""

    at_s: float
    data: bytes


def split_events(pieces: Iterable[Piece]) -> list[Stamped]:
    """Server-sent events, however the network cut them. Comments and other fields than `data` are skipped.

    An event that the stream's end cuts off is dropped, as the format's specification demands.
    """
    events: list[Stamped] = []
    data: list[bytes] = []
    rest = b""
    for at_s, received in pieces:
        *lines, rest = (rest + received).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                events.append(Stamped(at_s, b"\n".join(data)))
                data.clear()
    return events


class Timeline:
    """Token times of one request, fed with its events in order.

    The gap before an event that carries k tokens counts as k inter-token latencies of a k-th each. How many
    an event carries is known where the server says its running total, and taken as one otherwise.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.first_s: float | None = None
        self.last_s = 0.0
        self.gaps_s: list[float] = []
        self.text = ""
        self.seen_tokens = 0  # counted from events
        self.output_tokens: int | None = None  # as the server says
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.finished = False

    def add(self, at_s: float, event: Mapping[str, Any]) -> None:
        """Take one event. Raises `StreamError` with the server's words when it reports an error."""
        read = self._backend.read(event)
        if read.error is not None:
            raise StreamError(read.error[:MAX_ERROR_CHARS])
        self.finished = self.finished or read.finished
        for name in ("output_tokens", "prompt_tokens", "cached_tokens"):
            if (value := getattr(read, name)) is not None:
                setattr(self, name, value)
        if read.text:
            self.text = read.text if self._backend.cumulative else self.text + read.text
        if read.produced:
            self._add_tokens(at_s, 1 if read.output_tokens is None else read.output_tokens - self.seen_tokens)

    def _add_tokens(self, at_s: float, num: int) -> None:
        if num < 1:
            return
        if self.first_s is None:
            self.first_s = at_s
        else:
            self.gaps_s.extend([(at_s - self.last_s) / num] * num)
        self.last_s = at_s
        self.seen_tokens += num


def observe(
    prompt: Prompt,
    response: Response,
    backend: Backend,
    *,
    sent_s: float,
    start_s: float,
    count: Callable[[str], int] | None = None,
) -> Outcome:
    """What became of one request. Never raises for what the server did: that is the outcome's `error`.

    `sent_s` and `start_s` (the run's start) are `time.perf_counter` values. Output tokens are the server's
    count, else `count` of the text, else the number of events.
    """
    line = Timeline(backend)
    try:
        _read_stream(line, response)
    except StreamError as error:
        return failed(prompt, str(error), sent_s=sent_s, ended_s=response.ended_s, start_s=start_s)
    output = line.output_tokens
    if output is None:
        output = count(line.text) if count is not None else line.seen_tokens
    first_s = sent_s if line.first_s is None else line.first_s
    return Outcome(
        started_s=sent_s - start_s,
        e2e_s=response.ended_s - sent_s,
        ttft_s=first_s - sent_s,
        decode_s=line.last_s - first_s,
        itl_s=tuple(line.gaps_s),
        prompt_tokens=prompt.prompt_tokens or 0 if line.prompt_tokens is None else line.prompt_tokens,
        output_tokens=output,
        cached_tokens=line.cached_tokens,
        text=line.text,
    )


def _read_stream(line: Timeline, response: Response) -> None:
    if response.status != 200:
        words = response.body[:MAX_ERROR_CHARS].decode("utf-8", errors="replace")
        raise StreamError(f"HTTP {response.status}: {words}")
    done = False
    for at_s, data in split_events(response.pieces):
        if data == DONE:
            done = True
            break
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError as error:
            raise StreamError(f"an event is not JSON: {data[:80]!r}") from error
        if not isinstance(event, dict):
            raise StreamError(f"an event is not an object: {data[:80]!r}")
        line.add(at_s, event)
    if line.first_s is None:
        raise StreamError("the response has no output")
    if not (done or line.finished):
        raise StreamError("the stream ended before it was finished")


def failed(prompt: Prompt, error: str, *, sent_s: float, ended_s: float, start_s: float) -> Outcome:
    """The outcome of a request that gave nothing usable."""
    return Outcome(
        started_s=sent_s - start_s,
        e2e_s=max(ended_s - sent_s, 0.0),
        prompt_tokens=prompt.prompt_tokens or 0,
        error=error,
    )
