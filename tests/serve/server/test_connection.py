"""Connections of clients that send too much, or stop half-way."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import orjson
import pytest

import http_server
from serve.http.body_writer import BODY_WRITER, BodyWriter
from serve.server.connection import MAX_HEAD_BYTES, Connection

NUM_PIECES, PIECE_BYTES = 400, 50_000
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\n"
NUM_REFUSED = 60
REFUSED = b"POST /refused HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (NUM_REFUSED * PIECE_BYTES)


class Hasty(Connection):
    head_s = body_s = stall_s = linger_s = 0.05


class App:
    """An app that reads the whole body, then answers with its size. /flood answers with more than any buffer holds.

    /refused is answered before its body is read.
    """

    def __init__(self) -> None:
        self.left = asyncio.Event()  # the client of an answer has disconnected
        self.keeps_alive = False
        self.num_waits = 0  # how often a body writer was not ready

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        size, more = 0, scope["path"] != "/refused"
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            size, more = size + len(message["body"]), message["more_body"]
        body = b"x" * 50_000_000 if scope["path"] == "/flood" else b"size %d" % size
        await send({"type": "http.response.start", "status": 200, "headers": self._headers()})
        if scope["path"] == "/pieces":
            await self._write_pieces(scope[BODY_WRITER])
        await send({"type": "http.response.body", "body": body, "more_body": scope["path"] == "/flood"})
        await receive()
        self.left.set()

    def _headers(self) -> list[tuple[bytes, bytes]]:
        return [] if self.keeps_alive else [(b"connection", b"close")]

    async def _write_pieces(self, writer: BodyWriter) -> None:
        for number in range(NUM_PIECES):
            while not writer.ready:
                self.num_waits += 1
                await asyncio.sleep(0.001)
            writer.write(b"%d " % number + b"x" * PIECE_BYTES)


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture(params=[Hasty])
async def address(app: App, request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, int]]:
    async with http_server.serving(app, http=request.param, ws="none", lifespan="off") as url:
        parts = urlsplit(url)
        yield str(parts.hostname), int(parts.port or 0)


patient = pytest.mark.parametrize("address", [Connection], indirect=True)


async def exchange(address: tuple[str, int], *pieces: bytes) -> bytes:
    """Return the bytes that arrive until the server closes the connection; b"" if it resets the connection."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await asyncio.wait_for(reader.read(), 10)
    except ConnectionError:
        return b""
    finally:
        writer.close()


@patient
@pytest.mark.parametrize("start", [HEAD, HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"])
async def test_a_head_or_trailer_without_end_is_cut_off(address: tuple[str, int], start: bytes) -> None:
    answered = await exchange(address, start, b"x: ", *[b"a" * MAX_HEAD_BYTES] * 16)
    assert answered == b"" or b" 431 " in answered  # a reset may overtake the answer


@patient
@pytest.mark.parametrize("fields", [b"x: " + b"a" * 70_000 + b"\r\n", b"x: abc\r\n" * 10_000], ids=["large", "many"])
async def test_a_large_head_in_one_read_is_refused(address: tuple[str, int], fields: bytes) -> None:
    answered = await exchange(address, HEAD + fields + b"\r\n")
    assert answered.startswith(b"HTTP/1.1 431 ")


@patient
async def test_a_body_may_be_larger_than_a_head(address: tuple[str, int]) -> None:
    size = 8 * MAX_HEAD_BYTES
    answered = await exchange(address, HEAD + b"content-length: %d\r\n\r\n" % size, b"a" * size)
    assert b"size %d" % size in answered


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAIAAAAB\r\n"


@patient
@pytest.mark.parametrize("split", [False, True])
async def test_an_offer_of_another_protocol_is_declined(address: tuple[str, int], split: bool) -> None:
    """java.net.http.HttpClient offers it with its first request to a server."""
    request = HEAD + OFFER + b"content-length: 5\r\n\r\n"
    parts = [request, b"hello"] if split else [request + b"hello"]
    answered = await exchange(address, *parts)
    assert answered.startswith(b"HTTP/1.1 200 ")
    assert b"size 5" in answered


@patient
async def test_pipelined_offers_are_declined_each(address: tuple[str, int], app: App) -> None:
    app.keeps_alive = True
    bodies = [b"x" * size for size in range(1, 21)]
    requests = [HEAD + OFFER + b"content-length: %d\r\n\r\n" % len(body) + body for body in bodies]
    answered = await exchange(address, b"".join(requests) + HEAD + b"connection: close\r\n\r\n")
    assert [int(size) for size in re.findall(rb"size (\d+)", answered)] == [*range(1, 21), 0]


@patient
async def test_http_1_0_gets_no_chunks(address: tuple[str, int]) -> None:
    answered = await exchange(address, b"GET / HTTP/1.0\r\n\r\n")
    head, _, body = answered.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert body == b"size 0"


@patient
@pytest.mark.parametrize(
    ("sent", "status"), [(b"nonsense\r\n\r\n", 400), (HEAD + b"x: " + b"a" * 5 * MAX_HEAD_BYTES, 431)]
)
async def test_what_is_no_request_is_refused_as_all_else(address: tuple[str, int], sent: bytes, status: int) -> None:
    answered = await exchange(address, sent)
    head, _, body = answered.partition(b"\r\n\r\n")
    if status == 400 or head:  # a reset may overtake the answer while more data is in flight
        assert head.startswith(b"HTTP/1.1 %d " % status)
        assert orjson.loads(body)["error"]["code"] == status


async def write_body(writer: asyncio.StreamWriter) -> None:
    """Write the body of `REFUSED`. Raises ConnectionError if the server does not read it."""
    for _ in range(NUM_REFUSED):
        writer.write(b"x" * PIECE_BYTES)
        await writer.drain()
        await asyncio.sleep(0.001)


@patient
async def test_a_client_may_write_its_body_to_the_end_behind_the_answer(address: tuple[str, int]) -> None:
    reader, writer = await asyncio.open_connection(*address)
    writer.write(REFUSED)
    head = await reader.readuntil(b"\r\n\r\n")  # the answer was sent before the body arrives
    assert head.startswith(b"HTTP/1.1 200")
    await write_body(writer)
    assert b"size 0" in await asyncio.wait_for(reader.read(), 10)
    writer.close()


async def test_a_body_that_stays_away_behind_the_answer_is_given_up(address: tuple[str, int]) -> None:
    assert b"size 0" in await exchange(address, REFUSED)


@patient
async def test_no_more_than_so_much_is_read_behind_an_answer(
    address: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve.server.connection.LINGER_BYTES", 10 * PIECE_BYTES)
    reader, writer = await asyncio.open_connection(*address)
    writer.write(REFUSED)
    await reader.readuntil(b"\r\n\r\n")
    with pytest.raises(ConnectionError):
        await write_body(writer)
    writer.close()


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"content-length: 5\r\n\r\nab"])
async def test_a_request_that_stops_halfway_is_given_up(address: tuple[str, int], sent: bytes) -> None:
    assert await exchange(address, sent) == b""


async def test_an_answer_that_nobody_reads_is_given_up(address: tuple[str, int], app: App) -> None:
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, address)
        await loop.sock_sendall(client, b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(app.left.wait(), 10)


async def unread_pieces(address: tuple[str, int], app: App) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection with so many unread pieces of an answer that the server waits."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /pieces HTTP/1.1\r\nhost: x\r\n\r\n")
    while not app.num_waits:
        await asyncio.sleep(0.001)
    return reader, writer


@patient
async def test_pieces_wait_for_a_client_that_does_not_read(address: tuple[str, int], app: App) -> None:
    reader, writer = await unread_pieces(address, app)
    await reader.readuntil(b"\r\n\r\n")
    for number in range(NUM_PIECES):
        piece = await reader.readexactly(int(await reader.readline(), 16) + 2)
        assert piece == b"%d " % number + b"x" * PIECE_BYTES + b"\r\n"
    writer.close()


@patient
async def test_no_piece_is_written_to_a_client_that_left(address: tuple[str, int], app: App) -> None:
    _, writer = await unread_pieces(address, app)
    writer.transport.abort()
    num_waits = app.num_waits
    while app.num_waits < num_waits + 20:  # the writer polls without success
        await asyncio.sleep(0.001)


@patient
async def test_client_of_pipelined_requests_leaves_without_a_word_in_the_log(
    address: tuple[str, int], app: App, caplog: pytest.LogCaptureFixture
) -> None:
    _, writer = await asyncio.open_connection(*address)
    writer.write(b"GET /flood HTTP/1.1\r\nhost: x\r\n\r\n" * 20)
    await writer.drain()
    await asyncio.sleep(0.05)  # the first request is being answered, the others wait
    writer.transport.abort()
    await asyncio.wait_for(app.left.wait(), 10)
    assert caplog.records == []
