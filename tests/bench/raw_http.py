"""Requests as bytes, and a real server around an engine of this process: for clients that no library would be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import http_server
from serve.python.engine import Engine
from serve.server.app import build_app
from serve.server.connection import Connection

ANSWER_S = 5.0


@asynccontextmanager
async def serving(engine: Engine) -> AsyncIterator[int]:
    """The port of a server over this engine."""
    async with http_server.serving(build_app(engine.core), http=Connection) as url:
        yield int(url.rsplit(":", 1)[1])


def request(method: str, path: str, body: bytes, key: str | None = None) -> bytes:
    """A whole request, after whose answer the connection closes."""
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    if key is not None:
        head += f"authorization: Bearer {key}\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def ask(port: int, raw: bytes, wait_s: float = ANSWER_S) -> bytes:
    """What comes back until the server closes, or within `wait_s`; then the client leaves."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    found = bytearray()
    try:
        with suppress(ConnectionError, TimeoutError):
            async with asyncio.timeout(wait_s):
                writer.write(raw)
                while part := await reader.read(65536):
                    found += part
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
    return bytes(found)


def status_of(answer: bytes) -> int | None:
    """None where the server closed without one, or the client left before."""
    first = answer.split(b"\r\n", 1)[0].split(b" ")
    return int(first[1]) if len(first) > 1 and first[1].isdigit() else None
