"""One HTTP connection: uvicorn's protocol, with limits on the size of a request's head (its headers) and on time.

Without the limits, a malicious client could occupy memory and connections forever: with a header that never ends, a
body that never arrives, or an answer that it never reads.

Some clients offer to upgrade to another protocol (Java's client offers HTTP/2 to every server). The offer is ignored,
as RFC 9110, 7.8 allows. For clients of HTTP/1.0, a stream ends when the connection is closed (RFC 9112, 6.1).
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import cast

import httptools
import orjson
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from runtime.errors import InvalidRequest
from serve.http.body_writer import BODY_WRITER, BodyWriter
from serve.http.errors import Failure, openai_body

MAX_HEAD_BYTES = 64 * 1024
FIELD_BYTES = 4  # bytes of a header field in addition to its name and value: colon, space, end of line
HEAD_S = 10.0  # time limit in seconds for a request's head, from the connection's start or the head's first byte
BODY_S = 30.0  # seconds within which each further `BODY_BYTES` of the body must arrive
BODY_BYTES = 1_000_000
STALL_S = 30.0  # the connection is closed if the client reads nothing of its answer for this many seconds
# Limits on the rest of a body that a client still sends after it got its answer. The connection closes if one of them
# is exceeded.
LINGER_S, LINGER_BYTES = 10.0, 32 * 1024 * 1024


class _AnswerTransport:
    """The transport of one request-response cycle. Its `close` calls `Connection.close_after_answer`.

    The reference to the connection is weak.
    """

    __slots__ = ("_connection", "is_closing", "write")

    def __init__(self, connection: Connection) -> None:
        self._connection = weakref.ref(connection)
        self.write, self.is_closing = connection.transport.write, connection.transport.is_closing

    def close(self) -> None:
        connection = self._connection()
        if connection is not None:
            connection.close_after_answer()


class Connection(HttpToolsProtocol):
    """An HTTP connection that closes itself if the head is too large or the client stalls.

    A client stalls if it stops sending its request or reading its answer.
    """

    head_s = HEAD_S
    body_s = BODY_S
    stall_s = STALL_S
    linger_s = LINGER_S

    _plain_head = b""  # head to parse again, from which the offer of an upgrade was removed
    _num_unparsed = 0  # bytes since the parser last completed a head or body part
    _num_head_bytes = 0  # size in bytes of the request's target, headers and trailers
    _num_body_bytes = 0  # bytes of the body that arrived since the time limit `BODY_S` last started
    _num_lingered = -1  # number of bytes dropped after the last answer; -1: bytes are not being dropped
    _cycles: tuple[RequestResponseCycle, ...] = ()  # requests without a complete answer, including pipelined ones
    _arrival: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_arrival(self.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_arrival()
        self._stop_stall()
        super().connection_lost(exc)
        for cycle in self._cycles:  # uvicorn reports the disconnect only to the latest cycle
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self._cycles = ()
        self.pipeline.clear()

    # --- reading the request ---

    def data_received(self, data: bytes) -> None:
        if self._num_lingered >= 0:
            self._drop(data)
            return
        self._num_unparsed += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(memoryview(data))
        except httptools.HttpParserError:
            if self._num_head_bytes > MAX_HEAD_BYTES:  # `_count_head` stopped the parser
                self._refuse_head()
            else:
                self.logger.warning("Invalid HTTP request received.")
                self.send_400_response("The request is not valid HTTP.")
            return
        if self._num_unparsed > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse_head()

    def _feed(self, data: memoryview) -> None:
        """Parse `data`.

        The parser stops at a request that offers an upgrade. A new parser then reads the head without the offer.
        """
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:
                head, self._plain_head = self._plain_head, b""
                data = data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.feed_data(head)

    def send_400_response(self, msg: str) -> None:
        self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _refuse_head(self) -> None:
        message = f"The head of the request has more than {MAX_HEAD_BYTES} bytes."
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer invalid HTTP with an error in OpenAI's format, and close the connection."""
        body = orjson.dumps(openai_body(Failure(status, InvalidRequest.kind, message)))
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_head_bytes = 0
        if self._arrival is None:
            self._watch_arrival(self.head_s)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_head(len(name) + len(value) + FIELD_BYTES)

    def _count_head(self, num_bytes: int) -> None:
        """Count bytes of the head. Raises `ValueError`, which stops the parser, if the head is too large."""
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise ValueError("The head is too large.")

    def on_headers_complete(self) -> None:
        if self._num_lingered >= 0:  # ignore further requests after the body that is dropped
            return
        self._num_unparsed = self._num_body_bytes = 0
        if self.parser.should_upgrade():  # the parser now stops, and `_feed` parses `_plain_head` instead
            self._plain_head = self._head_without_upgrade()
            return
        super().on_headers_complete()
        self._watch_arrival(self.body_s)
        if self.cycle is not None:
            if self.scope["http_version"] == "1.0":
                self.cycle.send = partial(_send_until_close, self.cycle, self.cycle.send)  # type: ignore[method-assign]
            open_cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
            self._cycles = (*open_cycles, self.cycle)
            self.cycle.transport = _AnswerTransport(self)  # type: ignore[assignment]
            self.scope[BODY_WRITER] = BodyWriter(self.cycle)  # type: ignore[typeddict-unknown-key]

    def on_body(self, body: bytes) -> None:
        if self._num_lingered >= 0:
            return
        self._num_unparsed = 0
        self._num_body_bytes += len(body)
        if self._num_body_bytes >= BODY_BYTES:
            self._num_body_bytes = 0
            self._watch_arrival(self.body_s)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._plain_head:
            return
        self._num_unparsed = 0
        self._stop_arrival()
        if self._num_lingered >= 0:
            self.transport.close()
            return
        super().on_message_complete()

    def _head_without_upgrade(self) -> bytes:
        """Return the head that was just read, without the upgrade offer."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        fields = [b"%b: %b\r\n" % field for field in self.headers if field[0] != b"upgrade"]
        return b"".join([method, b" ", self.url, b" HTTP/", version, b"\r\n", *fields, b"\r\n"])

    def _watch_arrival(self, delay_s: float) -> None:
        self._stop_arrival()
        self._arrival = self.loop.call_later(delay_s, self._arrival_timed_out, delay_s)

    def _stop_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _arrival_timed_out(self, delay_s: float) -> None:
        if self._is_answering():  # uvicorn may have paused reading until the current request is answered
            self._watch_arrival(delay_s)
        else:
            self.transport.abort()

    def _is_answering(self) -> bool:
        """Whether a completely received request is being answered."""
        cycle = self.cycle
        if self.pipeline:
            return True
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    # --- the end ---

    def close_after_answer(self) -> None:
        """Close the connection. If the client is still sending its body, drop the rest of the body first.

        Closing a socket with unread bytes resets the connection. The reset may reach the client before it has read the
        answer, for example a 413.
        """
        if self.transport.is_closing():
            return
        if self.pipeline or self.cycle is None or not self.cycle.more_body:
            self.transport.close()
            return
        self._num_lingered = 0
        self._watch_arrival(self.linger_s)
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _drop(self, data: bytes) -> None:
        """Drop bytes that arrive after the last answer.

        The connection closes at the end of the request's body, or when the bytes exceed `LINGER_BYTES`.
        """
        self._unset_keepalive_if_required()
        self._num_lingered += len(data)
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self.transport.abort()
        if self._num_lingered > LINGER_BYTES:
            self.transport.abort()

    def shutdown(self) -> None:
        """Close immediately, unless a completely received request is being answered."""
        if self._is_answering():
            super().shutdown()
        else:
            self.transport.close()

    @property
    def num_unsent_bytes(self) -> int:
        """Number of bytes of the answer that the client has not yet taken from the write buffer."""
        return cast(asyncio.WriteTransport, self.transport).get_write_buffer_size()

    # --- writing the response ---

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        self._stop_stall()
        super().resume_writing()

    def _watch_stall(self) -> None:
        self._stall = self.loop.call_later(self.stall_s, self._stall_timed_out, self.num_unsent_bytes)

    def _stop_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _stall_timed_out(self, size_before: int) -> None:
        if self.num_unsent_bytes < size_before:
            self._watch_stall()  # the client reads, but slowly
        else:
            self.transport.abort()


async def _send_until_close(
    cycle: RequestResponseCycle, send: Callable[[ASGISendEvent], Awaitable[None]], message: ASGISendEvent
) -> None:
    """Send a part of an answer without chunked encoding, which HTTP/1.0 does not have."""
    if message["type"] == "http.response.start":
        cycle.chunked_encoding = False
    elif message["type"] == "http.response.body":
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)
