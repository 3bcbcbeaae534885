"""A client that resets its connection at any byte of its request or of the answer leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from urllib.parse import urlsplit

import psutil
import pytest

import http_server
import tiny_models
from serve import Engine
from serve.server.app import build_app
from serve.server.connection import Connection

SAMPLING = {"max_new_tokens": 200, "ignore_eos": True}
BODY = json.dumps({"text": "A long story", "stream": True, "sampling_params": SAMPLING}).encode()
HEAD = b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
REQUEST = HEAD % len(BODY) + BODY
SENT = (0, 1, 20, len(REQUEST) - len(BODY), len(REQUEST) - 1)
READ = (0, 1, 17, 200, 1000, 5000)


async def reset_after(url: str, num_sent: int, num_read: int) -> None:
    """Send this many bytes of the request, read this many of the answer, and reset the connection."""
    reader, writer = await asyncio.open_connection(urlsplit(url).hostname, urlsplit(url).port)
    writer.write(REQUEST[:num_sent])
    await writer.drain()
    if num_read:
        await reader.readexactly(num_read)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def neighbour(engine: Engine, seed: int) -> list[int]:
    sampling = {"max_new_tokens": 60, "seed": seed, "temperature": 1, "ignore_eos": True}
    return (await engine.generate(f"A story about the number {seed}", sampling))["output_ids"]


@pytest.mark.parametrize("part", ["request", "answer"])
async def test_reset_at_any_byte_costs_its_own_request(part: str) -> None:
    ends = [(sent, 0) for sent in SENT] if part == "request" else [(len(REQUEST), read) for read in READ]
    async with (
        Engine(tiny_models.cached(), max_total_tokens=2048, page_size=4, max_running_requests=8) as engine,
        http_server.serving(build_app(engine.core), http=Connection) as url,
    ):
        alone = [await neighbour(engine, seed) for seed in range(3)]
        await reset_after(url, *ends[-1])
        descriptors = psutil.Process().num_fds()
        others = [asyncio.create_task(neighbour(engine, seed)) for seed in range(3)]
        await asyncio.gather(*(reset_after(url, *end) for end in ends * 2))
        assert [await task for task in others] == alone
        async with asyncio.timeout(20):
            while engine.status().num_requests or psutil.Process().num_fds() > descriptors:
                await asyncio.sleep(0.01)
        engine.core.check()
        assert engine.status().num_used_pages == 0
        assert engine.status().state == "ready"
