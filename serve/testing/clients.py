"""HTTP clients for the whole server in this process: every route, no socket.

The application and the engine are those of the server. Only the connection is missing: an answer arrives as a whole,
also if it is a stream of events.
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

URL = "http://127.0.0.1"  # the server refuses names that it does not know


@asynccontextmanager
async def client(
    running: Engine | None = None, *, says: Sequence[str] | None = None, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield an `httpx.AsyncClient` for a server over `running`, or over a new engine with these options.

    `says` are the texts that the model answers, one per request, so that a test of an agent decides them; the last one
    repeats. Everything else is real: templates, parsers of tool calls, streams, limits and the cache.
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
    """Yield an `openai.AsyncOpenAI` for the same server. Needs the package openai."""
    from openai import AsyncOpenAI

    async with (
        client(running, says=says, **options) as http,
        AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, http_client=cast(Any, http)) as official,
    ):
        yield official
