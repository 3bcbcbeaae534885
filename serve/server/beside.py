"""An HTTP server for an engine that Python code also uses: `server = await http_server(engine, port=8000)`."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import suppress
from typing import Any, Self

from runtime.errors import EngineClosed
from serve.background import BackgroundTask, background_tasks
from serve.python.engine import Engine
from serve.python.sync_engine import SyncEngine
from serve.server.process import Server, bind, uvicorn_config
from serve.server.shutdown import Signals


class HttpServer:
    """Serves all routes on a port of this machine, in the process that also uses the engine from Python.

        async with http_server(engine, port=8000) as server: print(server.url)
        server = await http_server(engine)      # in a notebook; `await server.stop()` in a later cell
        with http_server(sync_engine) as server: ...

    With `port` 0, the system chooses a free port; `url` has the address. The server handles no signals and changes no
    logging. It ends with `stop`, or with the engine. The engine's HTTP options apply (`api_key`, `cors_allow_origins`,
    ...), except host and port.
    """

    def __init__(self, engine: Engine | SyncEngine, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self._engine = engine
        self._host, self._port = host, port
        self._task = BackgroundTask(self._run)
        self.url = ""

    async def start(self) -> Self:
        """Listen, and return when requests are accepted.

        Raises `ConfigurationError` if the port cannot be used, and `EngineClosed` if the engine is not running or the
        server is already started.
        """
        if self._task.running:
            raise EngineClosed("The server is already started.")
        _ = self._async_engine.core  # raises if the engine is not running
        await self._task.start()
        return self

    async def stop(self) -> None:
        """End the server. Answers in progress are cut off. The engine keeps running."""
        await self._task.stop()

    def close(self) -> None:
        """End the server of a `SyncEngine`, as `stop` does. Blocks until the server has ended."""
        if not isinstance(self._engine, SyncEngine):
            raise EngineClosed("Use `await server.stop()` for the server of an Engine.")
        self._engine._call(self.stop)

    @property
    def _async_engine(self) -> Engine:
        return self._engine if isinstance(self._engine, Engine) else self._engine._engine

    async def _run(self, started: Any) -> None:
        engine = self._async_engine
        with bind(self._host, self._port) as listening:
            signals = Signals()
            signals.forced.set()  # at the end, do not wait for clients that read slowly
            server = Server(uvicorn_config(engine.core), signals)
            async with background_tasks(server.serve(sockets=[listening]), _ended(engine)) as (serving, ended):
                while not server.started and not serving.done():  # noqa: ASYNC110, uvicorn has no event
                    await asyncio.sleep(0.001)
                host, port = listening.getsockname()[:2]
                scheme = "http" if server.config.ssl is None else "https"
                self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
                started()
                try:
                    await asyncio.wait((serving, ended), return_when=asyncio.FIRST_COMPLETED)
                finally:
                    server.should_exit = True
                    await asyncio.wait((serving,), timeout=5)

    def __await__(self) -> Generator[Any, Any, Self]:
        return self.start().__await__()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    def __enter__(self) -> Self:
        if not isinstance(self._engine, SyncEngine):
            raise EngineClosed("Use `async with` for an Engine; `with` is for a SyncEngine.")
        return self._engine._call(self.start)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _repr_html_(self) -> str:
        return f"<a href='{self.url}'>{self.url}</a>" if self.url else "not started"


async def _ended(engine: Engine) -> None:
    with suppress(Exception):  # the engine's own caller gets the error
        await engine.wait()


http_server = HttpServer
