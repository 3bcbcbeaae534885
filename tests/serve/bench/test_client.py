from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import orjson
import pytest

from runtime.errors import ConfigurationError
from serve.bench.client import Client, ExchangeError
from serve.bench.protocol import split_events

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def raw_server(answer: Answer) -> AsyncIterator[str]:
    """A server that writes the test's bytes, once per connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await answer(reader, writer)
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def writes(data: bytes) -> Answer:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return answer


def chat_body(words: str, num: int) -> bytes:
    return orjson.dumps({"messages": [{"role": "user", "content": words}], "max_tokens": num})


async def test_streamed_pieces_come_in_order_of_time(fake_server) -> None:
    async with Client(fake_server.url) as client:
        response = await client.post("/v1/chat/completions", chat_body("go", 5))
    times = [at_s for at_s, _ in split_events(response.received)]
    assert response.status == 200
    assert len(times) == 8  # the empty first event, five texts, usage, [DONE]
    assert times == sorted(times)
    assert len(set(times)) > 1
    assert response.ended_s >= times[-1]


async def test_connections_are_reused(fake_server) -> None:
    async with Client(fake_server.url) as client:
        await client.get("/v1/models")
        kept = client._idle[:]
        await client.post("/v1/chat/completions", chat_body("go", 2))
        assert client._idle == kept


async def test_a_prefix_and_v1_of_the_base_url_are_understood(fake_server) -> None:
    async with Client(fake_server.url + "/v1/") as client:
        assert orjson.loads((await client.get("/v1/models")).body)["data"][0]["id"] == "fake-model"


async def test_headers_are_sent(fake_server) -> None:
    async with Client(fake_server.url, {"Authorization": "Bearer k", "X-Run": "7"}) as client:
        await client.post("/v1/chat/completions", chat_body("go", 1))
    assert fake_server.headers[0]["authorization"] == "Bearer k"
    assert fake_server.headers[0]["x-run"] == "7"


async def test_refused_connections_fail_with_their_address(refused_url: str) -> None:
    async with Client(refused_url) as client:
        with pytest.raises(ExchangeError, match=r"no connection to 127\.0\.0\.1"):
            await client.get("/")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "without an answer"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf", "in the middle"),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n", "in the middle"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "did not speak HTTP"),
    ],
)
async def test_incomplete_answers_fail(data: bytes, words: str) -> None:
    async with raw_server(writes(data)) as url, Client(url) as client:
        with pytest.raises(ExchangeError, match=words):
            await client.get("/")


async def test_a_body_may_end_with_the_connection() -> None:
    async with raw_server(writes(b"HTTP/1.1 200 OK\r\n\r\nall of it")) as url, Client(url) as client:
        assert (await client.get("/")).body == b"all of it"


async def test_chunks_are_joined_across_reads() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in (
            b"HTTP/1.1 200 OK\r\ntransfer-enc",
            b"oding: chunked\r\n\r\n3\r",
            b"\nabc\r\n2\r\nde\r\n0\r\n\r\n",
        ):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0)

    async with raw_server(answer) as url, Client(url) as client:
        assert (await client.get("/")).body == b"abcde"


@pytest.mark.parametrize("num_last", range(1, 8))
async def test_a_streamed_body_ends_however_its_end_is_cut(num_last: int) -> None:
    head, body = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"2\r\nde\r\n0\r\n\r\n"

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in (head, b"3\r\nabc\r\n", body[:-num_last], body[-num_last:]):
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.01)  # so that it is a separate read
        await reader.read(-1)  # the connection stays open

    async with raw_server(answer) as url, Client(url) as client:
        with anyio.fail_after(5):
            assert (await client.get("/")).body == b"abcde"


async def test_a_kept_connection_that_went_away_is_replaced() -> None:
    answered = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answered
        answered += 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")  # closes the connection without announcing it

    async with raw_server(answer) as url, Client(url) as client:
        assert (await client.get("/")).body == b"ok"
        assert (await client.get("/")).body == b"ok"
    assert answered == 2


async def test_cancellation_closes_the_connection() -> None:
    gone = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        answering.set()
        await reader.read()
        gone.set()

    answering = asyncio.Event()
    async with raw_server(answer) as url, Client(url) as client:
        defaults = asyncio.create_task(client.get("/"))
        await answering.wait()
        defaults.cancel()
        with pytest.raises(asyncio.CancelledError):
            await defaults
        await asyncio.wait_for(gone.wait(), 10)


@pytest.mark.parametrize("url", ["ftp://host", "http://", "file:///x"])
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="not an http"):
        Client(url)


def test_headers_cannot_smuggle_lines() -> None:
    with pytest.raises(ConfigurationError, match="line break"):
        Client("http://h", {"X": "a\r\nY: b"})
