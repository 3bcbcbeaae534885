"""A real server on a real socket, in a thread with a loop of its own, for clients that block.

    with threaded_server.serving(build_app(core)) as url:
        requests_of_a_synchronous_client(url)

A test that awaits takes `http_server`, which serves in the test's loop. Both exist because httpx's ASGI
transport gives a response only when it is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn


class _Server(uvicorn.Server):
    """Tells another thread when it is up, and stops at once when that thread says so."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up_or_failed = threading.Event()
        self.failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told_to_stop = asyncio.Event()

    def run_until_told(self, listener: socket.socket) -> None:
        try:
            self.run(sockets=[listener])
        except BaseException as failure:  # raised again where the test waits
            self.failure = failure
        finally:
            self.up_or_failed.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        self.up_or_failed.set()

    async def main_loop(self) -> None:
        await self._told_to_stop.wait()

    def stop(self) -> None:
        """From any thread; does nothing when the server is already down."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._told_to_stop.set)


@contextlib.contextmanager
def serving(app: Any, **config: Any) -> Iterator[str]:
    """Serve `app` on a free port of the loopback and yield its address; returns when the thread has ended.

    `config` goes to uvicorn. Streams that are still open at the end are cancelled after a second. Raises
    RuntimeError when the application refuses to start, and whatever the server itself raised.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        settings = {"log_level": "warning", "timeout_graceful_shutdown": 1, **config}
        server = _Server(uvicorn.Config(app, **settings))
        thread = threading.Thread(target=server.run_until_told, args=[listener], name="test-server")
        thread.start()
        try:
            server.up_or_failed.wait()
            if not server.started:
                raise RuntimeError("the application did not start") from server.failure
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.stop()
            thread.join()
    if server.failure is not None:
        raise server.failure
