"""An application on a loopback socket of this process, and its clients in another process."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import anyio.to_thread
import uvicorn

from runtime.actors.engine_core import EngineCore
from runtime.errors import EngineFailure
from serve.server.process import uvicorn_config


@asynccontextmanager
async def serve_on_loopback(core: EngineCore) -> AsyncIterator[str]:
    """Serve a running core and yield its URL. Open connections are closed at the end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn_config(core)
        config.access_log = False
        server = uvicorn.Server(config)
        async with anyio.create_task_group() as group:
            # not `serve`, which would install signal handlers
            group.start_soon(server._serve, [listener])
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                group.cancel_scope.cancel()


async def measure_from_outside(url: str, options: Sequence[str]) -> dict[str, Any]:
    """Run the serving benchmark with these options in another process, and return its result.

    Raises `EngineFailure` if it failed. Cancellation ends the process.
    """
    with TemporaryDirectory() as name:
        file = Path(name) / "result.json"
        command = [sys.executable, "-m", "serve.bench", "serving", "--base-url", url, *options]
        command += ["--disable-progress", "--output-file", str(file)]
        # started by a thread, because the start is not part of the measurement
        client = await anyio.to_thread.run_sync(_start, command)
        try:
            said, _ = await anyio.to_thread.run_sync(client.communicate, abandon_on_cancel=True)
        finally:
            client.kill()
        if client.returncode:
            raise EngineFailure(f"The client failed: {said}")
        return json.loads(file.read_text(encoding="utf-8"))


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
