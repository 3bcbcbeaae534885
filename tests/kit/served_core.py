"""A scripted engine core behind the real web application, and the clients to reach it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import httpx
import openai
import orjson
from starlette.applications import Starlette

import fake_core
from serve.app import build_app


def app_of(core: fake_core.FakeCore) -> Starlette:
    """The application over a scripted core, which has what handlers use of an engine core."""
    return build_app(cast(Any, core))


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
