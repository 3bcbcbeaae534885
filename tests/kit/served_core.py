"""A scripted engine core behind the real web application, and clients for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, cast

import httpx
import openai
import orjson
from starlette.applications import Starlette

import fake_core
from serve.openai.responses.store import ResponseStore
from serve.server.app import build_app


def app_of(core: fake_core.FakeCore) -> Starlette:
    """Return the application over a scripted core."""
    return build_app(cast(Any, core))


@dataclass
class Served:
    """A running server, and the objects that a test needs."""

    core: fake_core.FakeCore
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    url: str
    responses: ResponseStore

    async def post(self, path: str, **body: Any) -> Any:
        """Return the parsed answer to a request that must succeed."""
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    async def events(self, path: str, **body: Any) -> list[Any]:
        """Return the parsed events of a stream, which must end with [DONE]."""
        response = await self.http.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *frames, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [orjson.loads(frame.removeprefix("data: ")) for frame in frames]

    async def lines_after(self, end: Callable[[], object], path: str, **body: Any) -> list[str]:
        """Return the lines of a held core's stream, which `end` ends after its first token."""
        asked = self.http.stream("POST", path, json={**body, "stream": True})
        async with AsyncExitStack() as stack:
            opening = asyncio.create_task(stack.enter_async_context(asked))
            while not self.core.num_open:
                await asyncio.sleep(0)
            self.core.step()
            lines = (await opening).aiter_lines()
            first = await anext(lines)
            end()
            return [first, *[line async for line in lines]]

    def fail(self) -> None:
        """End every request with an error."""
        self.core.failure = fake_core.broken_step()
        self.core.step()


Serve = Callable[..., Awaitable[Served]]
