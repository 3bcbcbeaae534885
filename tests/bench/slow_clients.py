"""`just slow-clients`: what well-behaved streams notice of slow clients (R10 of docs/reliability.md), and of requests
with long prompts and large schemas (R11). On the demo model, with server and clients in this process, so that the
clients' own work counts as the server's.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import orjson

from bench import PROGRAM
from bench.raw_http import ask, request, serving, status_of
from bench.soak import OPTIONS, settled
from serve.engine import Engine

HEALTHY = 4
SLOW_TOKENS = 16
RECEIVE_BYTES = 4096  # of a slow reader's socket
BYTE_S = 1.0  # between two bytes of a slow sender
PROBE_S = 0.002
LARGE = ("1 M-character prompts", "64 KiB schemas")


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog=f"{PROGRAM} slow", description=__doc__)
    parser.add_argument(
        "--clients", type=int, default=500, help="slow readers, and senders (default %(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each part (default %(default)s)")
    asked = parser.parse_args(argv)
    return asyncio.run(measure(asked.clients, asked.seconds))


async def measure(num_clients: int, seconds: float) -> int:
    """Run the parts one after the other and print what was found; 1 where R10 is not kept."""
    async with Engine(**OPTIONS) as engine, serving(engine) as port:
        await healthy(port, 1.0)
        alone = await healthy(port, seconds)
        async with slow_clients(port, num_clients) as num_open:
            await settled(engine)  # what the slow readers asked for is computed, and waits for them
            beside = await healthy(port, seconds)
        await settled(engine)
        lags: dict[str, list[float]] = {"nothing else": await lag(seconds)}
        statuses: dict[str, set[int | None]] = {}
        for name, raw in zip(LARGE, (long_prompt(), large_schema()), strict=True):
            statuses[name] = set()
            async with background(large_requests(port, raw, statuses[name])):
                lags[name] = await lag(seconds)
        await settled(engine)
        engine.core.check()
    before, after = _quantile(alone, 0.99), _quantile(beside, 0.99)
    print(
        f"R10 {num_open} slow clients; p99 between tokens of {HEALTHY} healthy streams: {before * 1e3:.1f} ms alone "
        f"({len(alone)} gaps), {after * 1e3:.1f} ms beside them ({len(beside)} gaps), {after / before - 1:+.0%}"
    )
    for name, found in lags.items():
        said = f"; answered {sorted(statuses[name], key=str)}" if name in statuses else ""
        p99, longest = _quantile(found, 0.99) * 1e3, max(found) * 1e3
        print(f"R11 loop lag with {name}: p99 {p99:.1f} ms, max {longest:.1f} ms{said}")
    return int(after > 1.1 * before)


# --- the well-behaved ---


async def healthy(port: int, seconds: float) -> list[float]:
    """Seconds between two pieces of streams that are read at once, one after the other in a few places."""
    gaps: list[float] = []
    end = time.monotonic() + seconds

    async def read() -> None:
        body = {"text": "Once", "stream": True, "sampling_params": {"max_new_tokens": 64, "ignore_eos": True}}
        while time.monotonic() < end:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request("POST", "/generate", orjson.dumps(body)))
            last = 0.0
            while line := await reader.readline():
                if line.startswith(b'data: {"text"'):
                    now = time.perf_counter()
                    if last:
                        gaps.append(now - last)
                    last = now
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    await asyncio.gather(*(read() for _ in range(HEALTHY)))
    return gaps


async def lag(seconds: float) -> list[float]:
    """How much later than asked for the loop wakes a sleeper, in seconds."""
    found: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        began = time.perf_counter()
        await asyncio.sleep(PROBE_S)
        found.append(time.perf_counter() - began - PROBE_S)
    return found


# --- the others ---


@asynccontextmanager
async def slow_clients(port: int, count: int) -> AsyncIterator[int]:
    """`count` clients that read nothing of their streams, and as many that send a byte a second. How many connected."""
    loop = asyncio.get_running_loop()
    sockets: list[socket.socket] = []
    sampling = {"max_new_tokens": SLOW_TOKENS, "ignore_eos": True}
    body = orjson.dumps({"text": "Once", "stream": True, "sampling_params": sampling})
    whole = request("POST", "/generate", body)

    async def connect() -> socket.socket:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        made.setblocking(False)
        sockets.append(made)
        await loop.sock_connect(made, ("127.0.0.1", port))
        return made

    async def dribble(to: socket.socket, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        with suppress(ConnectionError):
            for i in range(len(whole)):
                await loop.sock_sendall(to, whole[i : i + 1])
                await asyncio.sleep(BYTE_S)

    tasks: list[asyncio.Task[None]] = []
    try:
        for i in range(count):
            await loop.sock_sendall(await connect(), whole)
            tasks.append(asyncio.create_task(dribble(await connect(), i / count * BYTE_S)))
        yield len(sockets)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in sockets:
            each.close()


async def large_requests(port: int, raw: bytes, statuses: set[int | None]) -> None:
    """The same large request again and again."""
    while True:
        statuses.add(status_of(await ask(port, raw, 30)))


def long_prompt() -> bytes:
    body = {"text": "word " * 200_000, "sampling_params": {"max_new_tokens": 1}}
    return request("POST", "/generate", orjson.dumps(body))


def large_schema() -> bytes:
    """A schema of about 60 KiB."""
    properties: dict[str, Any] = {
        f"field_with_its_long_name_{i}": {"type": "string", "maxLength": 20} for i in range(850)
    }
    schema = orjson.dumps({"type": "object", "properties": properties}).decode()
    sampling = {"json_schema": schema, "max_new_tokens": 4}
    return request("POST", "/generate", orjson.dumps({"text": "Hi", "sampling_params": sampling}))


@asynccontextmanager
async def background(work: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[int(q * (len(values) - 1))] if values else float("nan")


if __name__ == "__main__":
    sys.exit(main())
