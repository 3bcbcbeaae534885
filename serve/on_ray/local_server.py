"""An engine and its HTTP application in one process, called directly instead of over a port."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Ray is an optional dependency.

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray import serve
from ray.serve import metrics
from starlette.types import Message, Scope

from runtime.config import Args
from serve.background import background_tasks
from serve.python.engine import Engine
from serve.server.app import build_app
from serve.server.process import warm_up

METRICS_S = 5.0
PART_S = 0.02  # minimum number of seconds between two parts of a stream
# Values of `EngineCore.status` that each replica reports to Ray's metrics.
GAUGES = ("num_running", "num_waiting", "num_used_tokens", "gen_throughput")
REPLICA_HEADER = b"x-replica"  # header of each answer, with the id of the replica that computed it


class LocalServer:
    """An engine and its HTTP application in a replica of Ray Serve."""

    def __init__(self, words: Sequence[str]) -> None:
        """Create the engine from command-line arguments. Raises `ConfigurationError` for invalid options."""
        self.engine = Engine.of(Args.parse(words))
        self.replica = serve.get_replica_context().replica_id.unique_id
        self._reporting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the model, and start to report Ray's metrics."""
        await self.engine.start()
        if not self.engine.core.plan.serve.skip_warmup:
            await warm_up(self.engine.core)
        self._app = build_app(self.engine.core)
        self._gauges = {name: metrics.Gauge(f"penstock_{name}") for name in GAUGES}
        self._reporting = asyncio.create_task(self._report())

    async def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[Any, None]:
        """Answer a request: yield (status, headers), and then the parts of the body.

        Parts of a stream are joined, so that at least `PART_S` seconds lie between two parts: each part costs Ray about
        1 ms of CPU time. The first and the last part are not delayed. If the caller stops reading, the request is
        aborted.
        """
        loop, next_s = asyncio.get_running_loop(), 0.0
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
                    yield message["status"], [*message["headers"], (REPLICA_HEADER, self.replica.encode())]
                    continue
                if message.get("more_body") and (rest := next_s - loop.time()) > 0:
                    await asyncio.sleep(rest)
                parts = [message.get("body", b"")]
                while not messages.empty():
                    parts.append(messages.get_nowait().get("body", b""))
                next_s = loop.time() + PART_S
                if part := b"".join(parts):
                    yield part

    async def whole_answer(self, scope: Scope, body: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Answer a request; return the status, the headers and the whole body."""
        answer = self.answer(scope, body)
        status, headers = await anext(answer)
        return status, headers, b"".join([part async for part in answer])

    def check_health(self) -> None:
        """Raise `RuntimeError` if the engine is not ready or a step hangs."""
        status = self.engine.core.status()
        if status.state != "ready" or status.hangs:
            raise RuntimeError(f"The engine is {status.state}.")

    async def aclose(self) -> None:
        """End the engine and the reports to Ray. May be called after `start` has failed."""
        if self._reporting is not None:
            self._reporting.cancel()
        await self.engine.aclose()

    async def _report(self) -> None:
        while True:
            status = self.engine.core.status()
            for name, gauge in self._gauges.items():
                gauge.set(getattr(status, name) or 0)
            await asyncio.sleep(METRICS_S)


async def _next(messages: asyncio.Queue[Message], answering: asyncio.Task[Any]) -> Message | None:
    """Return the application's next ASGI message, or None after the last. Raises the application's errors."""
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
