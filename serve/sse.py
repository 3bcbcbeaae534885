"""Server-sent events, written as finished bytes (see `Encoder`).

While the client keeps up, a chunk is written on the detokenizer's own turn: no task is woken for it, no coroutine
made, and the body of a stream is nothing that middleware has a say in. The first chunk of a stream, and what comes
while something is still being sent, goes the usual way through a task and ASGI's `send`. sse-starlette's response
cost several microseconds a token more; what is rare, pings and errors, is its `ServerSentEvent`. A stream begins with
its first chunk, so an error before it is still answered with its status.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

import anyio.to_thread
from sse_starlette.event import ServerSentEvent
from starlette.types import Receive, Scope, Send

from runtime.actors.output_stream import OutputStream
from runtime.errors import first_error
from runtime.request import Chunk
from serve.connection import BODY_WRITER, BodyWriter
from serve.errors import Dialect
from serve.replies import close_all, each, tasks_of, until_gone

PING_S = 15.0
PING = ServerSentEvent(comment="ping", sep="\n").encode()
DONE = b"data: [DONE]\n\n"
HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Encoder(Protocol):
    """Turns chunks into events of one protocol. One object per stream; it keeps what the stream needs."""

    def events(self, place: int, chunks: Sequence[Chunk]) -> bytes:
        """The events for what arrived from the request at `place`; may be empty."""
        ...

    def closing(self) -> bytes:
        """The events after the last chunk, before [DONE]."""
        ...


class EventStream:
    """An ASGI response that relays replies until they end or the client leaves; then they are closed.

    Awaiting the send is the back pressure: while the client does not read, nothing is taken from the reply.
    """

    def __init__(
        self, replies: Sequence[OutputStream], encoder: Encoder, dialect: Dialect, *, ping_s: float = PING_S
    ) -> None:
        self._replies = replies
        self._encoder = encoder
        self._dialect = dialect
        self._ping_s = ping_s
        self._starting = asyncio.Lock()
        self._started = False
        self._writer: BodyWriter | None = None
        self._num_writing = 0
        self._last_write_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._writer = scope.get(BODY_WRITER)
        try:
            async with tasks_of(self._relay_all(send), until_gone(receive)) as (relay, gone):
                await self._accompany(send, (relay, gone))
        finally:
            close_all(self._replies)
        if not gone.cancelled():
            gone.result()
        failure = None if relay.cancelled() else relay.result()
        if failure is not None and not self._started:
            await self._dialect.response(failure)(scope, receive, send)

    async def _accompany(self, send: Send, tasks: tuple[asyncio.Task[Any], ...]) -> None:
        """Until one of the tasks has ended, send a comment in every long silence, for proxies' sake."""
        wait_s = self._ping_s
        while True:
            ended, _ = await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if ended:
                return
            silence_s = time.monotonic() - self._last_write_s
            is_long = silence_s >= self._ping_s
            wait_s = self._ping_s if is_long else self._ping_s - silence_s
            # Not before the stream began, nor while the client does not read.
            if is_long and self._started and not self._num_writing:
                await self._write(send, PING)

    async def _relay_all(self, send: Send) -> Exception | None:
        """Relay to the end, also where that is an error. Returns it."""
        failure = await self._relay(send)
        if failure is not None and self._started and not isinstance(failure, OSError):
            await self._write(send, self._dialect.event(failure) + DONE, more=False)
        return failure

    async def _relay(self, send: Send) -> Exception | None:
        """Pass everything on. Returns the error that ended it early; an OSError when the client is gone."""

        async def read(place: int) -> None:
            async with aclosing(self._replies[place].chunks(partial(self._push, place))) as arrivals:
                async for chunks in arrivals:
                    if chunks[0].prompt_logprobs is None:
                        events = self._encoder.events(place, chunks)
                    else:  # thousands of numbers, once
                        events = await anyio.to_thread.run_sync(self._encoder.events, place, chunks)
                    if events:
                        await self._write(send, events)

        try:
            await each(read, len(self._replies))
            await self._write(send, self._encoder.closing() + DONE, more=False)
        except ExceptionGroup as errors:
            return first_error(errors)
        except Exception as error:  # the request's border: the stream says it in its own words
            return error
        return None

    def _push(self, place: int, chunk: Chunk) -> bool:
        """Write a chunk's events at once; False where that cannot be."""
        writer = self._writer
        if writer is None or not self._started or self._num_writing or not writer.ready:
            return False
        if chunk.prompt_logprobs is not None:
            return False
        if events := self._encoder.events(place, (chunk,)):
            self._last_write_s = time.monotonic()
            writer.write(events)
        return True

    async def _write(self, send: Send, body: bytes, *, more: bool = True) -> None:
        """Send whole events, so that those of several replies and pings never mix."""
        if not self._started:
            await self._start(send)
        self._last_write_s = time.monotonic()
        self._num_writing += 1
        try:
            await send({"type": "http.response.body", "body": body, "more_body": more})
        finally:
            self._num_writing -= 1

    async def _start(self, send: Send) -> None:
        async with self._starting:
            if not self._started:
                await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
                self._started = True
