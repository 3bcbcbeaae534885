"""The Ray Serve deployment that contains an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

from starlette.types import Scope

from serve.on_ray.local_server import LocalServer
from serve.on_ray.prompt_key import PromptKey


class EngineReplica:
    """One replica: an engine in its own process."""

    async def __init__(self, words: Sequence[str]) -> None:
        """Load the model. `words` has the engine's command-line options."""
        self._server = LocalServer(words)
        await self._server.start()

    async def answer(self, key: PromptKey, scope: Scope, body: bytes) -> AsyncIterator[Any]:
        """Answer a request: yield (status, headers), and then the parts of the body.

        `key` is used only by the request router. If the caller stops reading, the request is aborted.
        """
        async with aclosing(self._server.answer(scope, body)) as parts:
            async for part in parts:
                yield part

    async def whole_answer(self, scope: Scope, body: bytes) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
        """Answer a request that is sent to all replicas. Returns the status, the headers and the whole body."""
        return await self._server.whole_answer(scope, body)

    async def check_health(self) -> None:
        """Raise `RuntimeError` if the engine does not work. Ray Serve calls this, and replaces a failed replica."""
        self._server.check_health()

    async def __del__(self) -> None:
        """Release the engine. Ray Serve calls this after the last request has ended."""
        await self._server.aclose()
