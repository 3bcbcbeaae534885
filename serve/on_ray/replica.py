"""One replica: an engine, and the server's own application for it."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Ray is an optional dependency.

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

from ray.serve import metrics
from starlette.types import Message, Scope

from runtime.config import Args
from serve.background import background_tasks
from serve.python.engine import Engine
from serve.server.app import build_app
from serve.server.process import warm_up

METRICS_S = 5.0
# Values of `EngineCore.status` that are reported to Ray's metrics per replica.
GAUGES = ("num_running", "num_waiting", "num_used_tokens", "gen_throughput")


class EngineReplica:
    """The Ray Serve deployment that contains an engine."""

    async def __init__(self, words: Sequence[str]) -> None:
        """Load the model. `words` are the engine's options as on the command line."""
        self._engine = Engine.of(Args.parse(words))
        await self._engine.start()
        if not self._engine.core.plan.serve.skip_warmup:
            await warm_up(self._engine.core)
        self._app = build_app(self._engine.core)
        self._gauges = {name: metrics.Gauge(f"penstock_{name}") for name in GAUGES}
        self._reporting = asyncio.create_task(self._report())

    async def answer(self, key: list[int], scope: Scope, body: bytes) -> AsyncIterator[Any]:
        """Answer a request: yield (status, headers), and then the parts of the body.

        `key` is only for the router (`prompt_key`). If the caller stops reading, the request is aborted.
        """
        messages: asyncio.Queue[Message] = asyncio.Queue(maxsize=64)
        bodies = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if bodies:
                return bodies.pop()
            await asyncio.Event().wait()  # never returns; the end of the call cancels this task
            raise AssertionError

        async with background_tasks(self._app({**scope, "state": {}}, receive, messages.put)) as (answering,):
            while (message := await _next(messages, answering)) is not None:
                if message["type"] == "http.response.start":
                    yield message["status"], list(message["headers"])
                elif message.get("body"):
                    yield message["body"]

    async def check_health(self) -> None:
        """Raise an error unless the engine works. Ray Serve calls this, and replaces a replica that fails."""
        status = self._engine.core.status()
        if status.state != "ready" or status.hangs:
            raise RuntimeError(f"The engine is {status.state}.")

    async def __del__(self) -> None:
        """Release the engine. Ray Serve calls this after the last request has ended."""
        self._reporting.cancel()
        await self._engine.aclose()

    async def _report(self) -> None:
        while True:
            status = self._engine.core.status()
            for name, gauge in self._gauges.items():
                gauge.set(getattr(status, name) or 0)
            await asyncio.sleep(METRICS_S)


async def _next(messages: asyncio.Queue[Message], answering: asyncio.Task[Any]) -> Message | None:
    """Return the next message of the application, or None after the last one. Raises the application's errors."""
    if messages.empty() and not answering.done():
        waiting = asyncio.ensure_future(messages.get())
        try:
            await asyncio.wait((waiting, answering), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                return waiting.result()
        finally:
            waiting.cancel()
    if not messages.empty():
        return messages.get_nowait()
    await answering
    return None
