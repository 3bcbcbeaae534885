"""A small HTTP/1.1 client that costs a few microseconds per streamed event, so that it does not distort measurements.

Each read costs one clock reading and one `append`. The bytes are parsed only when the response seems to have ended.
httptools, which the server also uses, handles the framing (chunks, lengths, keep-alive).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from types import TracebackType
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from runtime.errors import ConfigurationError


class ExchangeError(Exception):
    """Raised if no complete response arrived.

    The connection was refused or closed early, or the server does not speak HTTP.
    """


class Received(NamedTuple):
    """Bytes of a body that were read together, and the time of the read (`time.perf_counter`)."""

    at_s: float
    data: bytes


@dataclass(slots=True)
class Response:
    """A complete response. `received` has the parts of the body in order of arrival."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)  # names in lower case
    received: list[Received] = field(default_factory=list)
    ended_s: float = 0.0

    @property
    def body(self) -> bytes:
        return b"".join(part.data for part in self.received)


class Connection(asyncio.Protocol):
    """One HTTP connection, on which one request at a time is sent."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Response] | None = None
        self._response = Response()
        self._parser: httptools.HttpResponseParser | None = None
        self._reads: list[tuple[float, bytes]] = []  # (time, bytes) of reads that are not yet parsed
        self._in_chunks = False
        self._now = 0.0
        self.reusable = True
        self.closed = False

    async def exchange(self, request: bytes) -> Response:
        """Send `request` (headers and body), and return the response when its last byte has arrived.

        Raises `ExchangeError` if no complete response arrives. Cancellation closes the connection.
        """
        if self._transport is None or self.closed:
            raise ExchangeError("the connection was closed")
        self._response = Response()
        self._parser = httptools.HttpResponseParser(self)
        self._reads, self._in_chunks = [], False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._done
        except BaseException:
            self.close()
            raise

    @property
    def untouched(self) -> bool:
        """Whether nothing of the response has arrived."""
        return self._response.status == 0

    def close(self) -> None:
        self.closed = True
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # Callbacks that asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._parser is None or self._done is None or self._done.done():
            self.close()  # the server sent bytes although no request is open
            return
        self._reads.append((perf_counter(), data))
        # A chunked body is parsed only if it may be complete. It ends with an empty line. A short read may be the rest
        # of this line.
        if not self._in_chunks or data.endswith(b"\r\n\r\n") or len(data) < 4:
            self._parse(self._parser)

    def _parse(self, parser: httptools.HttpResponseParser) -> None:
        reads, self._reads = self._reads, []
        try:
            for self._now, data in reads:
                parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the server did not speak HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._parser is not None:
            self._parse(self._parser)
        headers = self._response.headers
        open_ended = "content-length" not in headers and "transfer-encoding" not in headers
        if exc is None and self._response.status and open_ended:
            self._now = perf_counter()
            self.on_message_complete()
        elif self.untouched:
            self._fail("the server closed the connection without an answer")
        else:
            self._fail("the server closed the connection in the middle of its answer")

    # Callbacks that httptools calls.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._response.status = self._parser.get_status_code() if self._parser else 0
        self._in_chunks = "transfer-encoding" in self._response.headers

    def on_body(self, data: bytes) -> None:
        self._response.received.append(Received(self._now, data))

    def on_message_complete(self) -> None:
        self.reusable = self.reusable and self._parser is not None and self._parser.should_keep_alive()
        self._response.ended_s = self._now
        if self._done is not None and not self._done.done():
            self._done.set_result(self._response)

    def _fail(self, why: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ExchangeError(why))


class Client:
    """Sends requests to one base URL over reused connections. An async context manager."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        url = urlsplit(base_url if "//" in base_url else f"http://{base_url}")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ConfigurationError(f"{base_url} is not an http or https URL.")
        self._host = url.hostname
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._tls else 80)
        self._prefix = url.path.rstrip("/").removesuffix("/v1")
        fixed = {"Host": url.netloc.rpartition("@")[2], "Accept": "*/*", **(headers or {})}
        if any("\r" in part or "\n" in part for pair in fixed.items() for part in pair):
            raise ConfigurationError("A header must not contain a line break.")
        self._fixed = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())
        self._idle: list[Connection] = []

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._idle:
            self._idle.pop().close()

    async def connect(self, count: int) -> None:
        """Open connections until `count` are idle, so that the first requests do not wait for connections.

        Raises `ExchangeError` if a connection cannot be opened.
        """
        while len(self._idle) < count:
            self._idle.append(await self._connect())

    async def get(self, path: str) -> Response:
        return await self._exchange(self._head("GET", path, "") + b"\r\n")

    async def post(self, path: str, body: bytes) -> Response:
        """Send a POST request with a JSON body, and return the response, whatever its status.

        Raises `ExchangeError` if no complete response arrives.
        """
        extra = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        return await self._exchange(self._head("POST", path, extra) + b"\r\n" + body)

    def _head(self, method: str, path: str, extra: str) -> bytes:
        return f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._fixed}{extra}".encode("latin-1")

    async def _exchange(self, request: bytes) -> Response:
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._use(connection, request)
            except ExchangeError:
                # Try again if nothing of the response has arrived: the server may have closed the idle connection.
                if not connection.untouched:
                    raise
        return await self._use(await self._connect(), request)

    async def _use(self, connection: Connection, request: bytes) -> Response:
        response = await connection.exchange(request)
        if connection.reusable and not connection.closed:
            self._idle.append(connection)
        else:
            connection.close()
        return response

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(Connection, self._host, self._port, ssl=self._tls)
        except OSError as error:
            raise ExchangeError(f"no connection to {self._host}:{self._port}: {error.strerror or error}") from error
        return connection
