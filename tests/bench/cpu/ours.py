"""`python -m bench.cpu.ours`: run Penstock with the same interface as every peer.

With `--serve` the same process also serves HTTP like `penstock serve`, so that jobs in process and requests over HTTP
use the same engine. Options that the runner does not know are options of the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from time import perf_counter
from typing import Any

import anyio
import anyio.to_thread
import uvicorn

from bench.cpu.peers.answering import Lines, add_run_options, answer_of, versions
from runtime.config import Args
from serve import Engine
from serve.bench.metrics import percentile
from serve.server.process import tune_interpreter, uvicorn_config, warm_up

TICK_S = 0.005  # frequent enough for a percentile, but too rare to affect the measurement
PACKAGES = ("penstock", "torch")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_run_options(parser)
    options, rest = parser.parse_known_args(argv)
    args = Args.parse(["--model-path", options.model, *rest])
    lines = Lines()
    anyio.run(run, lines, args, options.serve, backend_options={"use_uvloop": sys.platform != "win32"})


async def run(lines: Lines, args: Args, serve: bool) -> None:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Engine.of(args))
        ready: dict[str, Any] = {"ready": True, "versions": versions(PACKAGES)}
        if serve:
            ready["url"] = await stack.enter_async_context(serving(engine))
        lag = await stack.enter_async_context(watching())
        lines.say(ready)
        while (job := await anyio.to_thread.run_sync(lines.next_job)) is not None:
            lines.say(await answer(engine, lag, job))


async def answer(engine: Engine, lag: LoopLag, job: dict[str, Any]) -> dict[str, Any]:
    if job.get("watch"):
        lag.begin()
        return {}
    if job.get("lag"):
        return {"lag_s": percentile(sorted(lag.end()), 99)}
    sampling = {"temperature": 0.0, "max_new_tokens": job["new_tokens"], "ignore_eos": True}
    began = perf_counter()
    results = await engine.generate(input_ids=job["prompts"], sampling_params=sampling)
    return answer_of([result["output_ids"] for result in results], perf_counter() - began)


class LoopLag:
    """Measures how late the event loop wakes a task that sleeps briefly. Idle until `begin`."""

    def __init__(self) -> None:
        self._active = asyncio.Event()
        self._late_s: list[float] = []

    def begin(self) -> None:
        self._late_s = []
        self._active.set()

    def end(self) -> list[float]:
        """Return the delay of each tick in seconds; at least one value."""
        self._active.clear()
        return self._late_s or [0.0]

    async def watch(self) -> None:
        while True:
            await self._active.wait()
            due = perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            self._late_s.append(perf_counter() - due)


@asynccontextmanager
async def watching() -> AsyncIterator[LoopLag]:
    lag = LoopLag()
    async with anyio.create_task_group() as group:
        group.start_soon(lag.watch)
        yield lag
        group.cancel_scope.cancel()


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[str]:
    """Serve the application on a free port of the loopback interface, and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn_config(engine.core))
        await warm_up(engine.core)
        tune_interpreter()
        async with anyio.create_task_group() as group:
            # not `serve`, which would install signal handlers
            group.start_soon(server._serve, [listener])
            try:
                yield f"http://127.0.0.1:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                group.cancel_scope.cancel()


if __name__ == "__main__":
    main(sys.argv[1:])
