"""Streamed answers: a response that relays output streams through an encoder, usually as server-sent events.

The first chunk, and chunks that arrive during a send, wake the response's task, which awaits ASGI's `send`. While the
client reads fast enough, the detokenizer's callback writes each chunk directly to the connection, without waking a task
or creating a coroutine. A response begins with its first chunk, so an earlier error is answered with its own status.

This module does not use sse-starlette's response class, which costs several microseconds more per token. Only errors
use that package, namely its `ServerSentEvent` (`serve/http/errors.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import anyio.to_thread
from starlette.types import Receive, Scope, Send

from runtime.actors.output_stream import OutputStream, close_all
from runtime.errors import first_error
from runtime.request import Chunk
from serve.background import background_tasks
from serve.http.body_writer import BODY_WRITER, BodyWriter
from serve.http.endpoint import until_disconnect
from serve.http.errors import ErrorFormat
from serve.http.first_token import note_streams

PING_S = 15.0
PING = b": ping\n\n"  # a comment, which clients ignore

DONE = b"data: [DONE]\n\n"
MAX_UNREAD_BYTES = 512 * 1024  # limit on the output that a slow client has not read yet; about 14,000 tokens


@dataclass(frozen=True, slots=True)
class Framing:
    """The parts of a stream that are not events: the content type, the end mark and pings."""

    content_type: bytes = b"text/event-stream; charset=utf-8"
    done: bytes = DONE  # sent after the last event
    ping: bytes = PING  # sent during long silences; empty: no pings

    def headers(self) -> list[tuple[bytes, bytes]]:
        return [
            (b"content-type", self.content_type),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
        ]


SSE = Framing()


class Encoder(Protocol):
    """Converts chunks to the events of one API. Each response has its own encoder, which may keep state."""

    def events(self, request_index: int, chunks: Sequence[Chunk]) -> bytes:
        """Return the events for new chunks of the request with this index. The result may be empty."""
        ...

    def closing(self) -> bytes:
        """Return the events after the last chunk, before the framing's `done`."""
        ...


class EventStream:
    """An ASGI response that relays output streams until they end or the client disconnects, and then closes them.

    While `send` waits for a slow client, no chunks are read from the streams.
    """

    def __init__(
        self,
        streams: Sequence[OutputStream],
        encoder: Encoder,
        error_format: ErrorFormat,
        *,
        framing: Framing = SSE,
        ping_s: float = PING_S,
    ) -> None:
        note_streams(streams)
        self._streams = streams
        self._encoder = encoder
        self._error_format = error_format
        self._framing = framing
        self._ping_s = ping_s
        self._encoding = asyncio.Lock()  # held while the encoder is in use, possibly in a thread
        self._starting = asyncio.Lock()
        self._started = False
        self._writer: BodyWriter | None = None
        self._num_writing = 0
        self._last_write_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._writer = scope.get(BODY_WRITER)
        try:
            async with background_tasks(self._relay_all(send), until_disconnect(receive)) as (relay, gone):
                await self._ping_until_done(send, (relay, gone))
        finally:
            close_all(self._streams)
        if not gone.cancelled():
            gone.result()
        failure = None if relay.cancelled() else relay.result()
        if failure is not None and not self._started:
            await self._error_format.response(failure)(scope, receive, send)

    async def _ping_until_done(self, send: Send, tasks: tuple[asyncio.Task[Any], ...]) -> None:
        """Send a comment after each `ping_s` seconds of silence until a task ends. Proxies close silent streams."""
        wait_s = self._ping_s
        while True:
            ended, _ = await asyncio.wait(tasks, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
            if ended:
                return
            silence_s = time.monotonic() - self._last_write_s
            is_long = silence_s >= self._ping_s
            wait_s = self._ping_s if is_long else self._ping_s - silence_s
            # A ping is sent only after the stream has begun, and while no write waits for a slow client.
            if is_long and self._started and not self._num_writing and self._framing.ping:
                await self._write(send, self._framing.ping)

    async def _relay_all(self, send: Send) -> Exception | None:
        """Relay all chunks, and send an error event if an error ends a begun stream. Returns the error, or None."""
        failure = await self._relay(send)
        if failure is not None and self._started and not isinstance(failure, OSError):
            await self._write(send, self._error_format.event(failure) + self._framing.done, more=False)
        return failure

    async def _relay(self, send: Send) -> Exception | None:
        """Relay every chunk. Returns the error that ended the stream early, or None.

        The error is an OSError if the client disconnected.
        """

        async def read(index: int) -> None:
            async with aclosing(self._streams[index].chunks(partial(self._push, index), MAX_UNREAD_BYTES)) as arrivals:
                async for chunks in arrivals:
                    async with self._encoding:
                        if chunks[0].prompt_logprobs is None:
                            events = self._encoder.events(index, chunks)
                        else:  # in a thread, because the chunks may hold thousands of log-probabilities
                            events = await anyio.to_thread.run_sync(self._encoder.events, index, chunks)
                    if events:
                        await self._write(send, events)

        try:
            if len(self._streams) == 1:
                await read(0)
            else:
                async with anyio.create_task_group() as group:
                    for index in range(len(self._streams)):
                        group.start_soon(read, index)
            await self._write(send, self._encoder.closing() + self._framing.done, more=False)
        except ExceptionGroup as errors:
            return first_error(errors)
        except Exception as error:  # an error must not affect other streams
            return error
        return None

    def _push(self, index: int, chunk: Chunk) -> bool:
        """Write a chunk's events directly to the connection. Return False if the response's task must send them."""
        writer = self._writer
        if writer is None or not self._started or self._num_writing or not writer.ready:
            return False
        if chunk.prompt_logprobs is not None or self._encoding.locked():
            return False
        if events := self._encoder.events(index, (chunk,)):
            self._last_write_s = time.monotonic()
            writer.write(events)
        return True

    async def _write(self, send: Send, body: bytes, *, more: bool = True) -> None:
        """Send `body`, which must be complete events, because other events and pings may be sent before and after."""
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
                await send({"type": "http.response.start", "status": 200, "headers": self._framing.headers()})
                self._started = True
