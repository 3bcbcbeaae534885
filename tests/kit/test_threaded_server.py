from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import AsyncIterator

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

import threaded_server


class Echo:
    """Streams a piece and, when another request allows it, the next; notes when a stream is cut off."""

    def __init__(self) -> None:
        self.cut_off = threading.Event()
        self.events: list[str] = []
        self.app = Starlette(
            routes=[Route("/stream", self.stream), Route("/go", self.go)], lifespan=self.lifespan
        )

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._allowed = asyncio.Event()
        self.events.append("up")
        yield
        self.events.append("down")

    async def stream(self, request: Request) -> StreamingResponse:
        async def pieces() -> AsyncIterator[bytes]:
            try:
                yield b"one"
                await self._allowed.wait()
                yield b"two"
            except asyncio.CancelledError:
                self.cut_off.set()
                raise

        return StreamingResponse(pieces())

    async def go(self, request: Request) -> Response:
        self._allowed.set()
        return Response("ok")


def test_pieces_arrive_as_they_are_sent() -> None:
    with (
        threaded_server.serving(Echo().app) as url,
        httpx.Client(base_url=url) as client,
        client.stream("GET", "/stream") as response,
    ):
        pieces = response.iter_bytes()
        assert next(pieces) == b"one"  # while the second is not allowed yet
        assert httpx.get(f"{url}/go").text == "ok"
        assert list(pieces) == [b"two"]


def test_leaving_ends_the_thread_and_the_lifespan_and_keeps_the_signals() -> None:
    echo, threads, handler = Echo(), threading.active_count(), signal.getsignal(signal.SIGINT)
    with threaded_server.serving(echo.app) as url:
        assert echo.events == ["up"]
        assert threading.active_count() > threads
        assert signal.getsignal(signal.SIGINT) is handler
    assert echo.events == ["up", "down"]
    assert threading.active_count() == threads
    with pytest.raises(httpx.ConnectError):
        httpx.get(url)


def test_a_client_that_leaves_cuts_its_stream_off() -> None:
    echo = Echo()
    with threaded_server.serving(echo.app) as url:
        with httpx.stream("GET", f"{url}/stream") as response:
            assert next(response.iter_bytes()) == b"one"
        assert echo.cut_off.wait(timeout=10)


def test_an_application_that_does_not_start_is_an_error() -> None:
    @contextlib.asynccontextmanager
    async def broken(app: Starlette) -> AsyncIterator[None]:
        raise ValueError("no")
        yield

    with (
        pytest.raises(RuntimeError, match="did not start"),
        threaded_server.serving(Starlette(lifespan=broken), log_level="critical"),
    ):
        pass
