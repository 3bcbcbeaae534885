"""HTTP clients for all routes of a server in this process, without a socket.

The application and the engine are the real ones. Only the connection is missing, so each answer arrives as a whole,
even a stream of events.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, cast

import httpx

from runtime.errors import InvalidRequest
from serve.python.engine import Engine
from serve.server.app import build_app
from serve.testing.engines import engine
from serve.testing.script import ScriptedCore

URL = "http://127.0.0.1"  # the server refuses unknown host names


@asynccontextmanager
async def client(
    running: Engine | None = None, *, says: Sequence[str] | None = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield an `httpx.AsyncClient` for a server on the engine `running`, or on a new engine with these options.

    If `says` is set, the model's answers are these texts, one per request; later requests get the last text.
    Everything else is real: chat templates, parsers of tool calls, streams, limits and the cache.
    """
    if running is None:
        async with engine(**options) as started, client(started, says=says) as http:
            yield http
        return
    if options:
        raise InvalidRequest("Give an engine or options of a new one, not both.")
    core: Any = running.core if says is None else ScriptedCore(running, says)
    transport = httpx.ASGITransport(app=build_app(core), client=("127.0.0.1", 1))
    async with httpx.AsyncClient(transport=transport, base_url=URL) as http:
        yield http


@asynccontextmanager
async def openai_client(
    running: Engine | None = None, *, says: Sequence[str] | None = None, **options: Any
) -> AsyncIterator[Any]:
    """Yield an `openai.AsyncOpenAI` client; its arguments are those of `client`. Requires the package openai."""
    from openai import AsyncOpenAI

    async with (
        client(running, says=says, **options) as http,
        AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, http_client=cast(Any, http)) as official,
    ):
        yield official
