"""A scripted core behind a real server, and the clients to reach it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import orjson

import fake_core


@dataclass
class Served:
    """A running server and what a test needs of it."""

    core: fake_core.FakeCore
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    url: str

    async def post(self, path: str, **body: Any) -> Any:
        """The parsed answer to a request that must succeed."""
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    async def events(self, path: str, **body: Any) -> list[Any]:
        """The parsed events of a stream, which must end with [DONE]."""
        response = await self.http.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        *frames, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [orjson.loads(frame.removeprefix("data: ")) for frame in frames]


Serve = Callable[..., Awaitable[Served]]
