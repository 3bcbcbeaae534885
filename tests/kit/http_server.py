"""A real server on a real socket, in the test's own loop.

    async with http_server.serving(build_app(core)) as url:
        ...

Streaming cannot be tested without one: httpx's ASGI transport gives a response only when it is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from typing import Any

import uvicorn


class _Server(uvicorn.Server):
    """A server that leaves signals to pytest, and stops immediately on request."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.told_to_stop = asyncio.Event()

    async def main_loop(self) -> None:
        await self.told_to_stop.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(app: Any, *, tls: ssl.SSLContext | None = None, **config: Any) -> AsyncIterator[str]:
    """Serve `app` on a free port and yield its address. Returns when the server has stopped."""
    # asyncio sets TCP_NODELAY only on sockets that name their protocol.
    with socket.socket(proto=socket.IPPROTO_TCP) as listener:
        listener.bind(("127.0.0.1", 0))
        settings = {"log_config": None, "log_level": "warning", "timeout_graceful_shutdown": 1, **config}
        made = uvicorn.Config(app, **settings)
        if tls is not None:
            made.load()
            made.ssl = tls
        server = _Server(made)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            while not server.started and not task.done():
                await asyncio.sleep(0)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.told_to_stop.set()
            await task
