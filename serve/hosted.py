"""One task holds the engine's tree; others only signal it.

A task group must be left by the task that entered it. Notebook cells, fixtures and web frameworks enter in
one task and leave in another, so the tree gets a task of its own here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from runtime.errors import EngineClosed


class Hosted:
    """Runs `main(started)` in its own task from `start` to `stop`.

    `main` calls `started()` when it is up and then runs until it is cancelled.
    """

    def __init__(self, main: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        self._main = main
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def start(self) -> None:
        """Return when `main` is up, or raise what it raised before. Cancelled, it leaves nothing running."""
        up = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(up), name="penstock-engine")
        try:
            await asyncio.wait([up, self._task], return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            await self.stop()
            raise
        if self._task.done():
            await self._task
            raise EngineClosed("The engine ended while it started.")

    async def _run(self, up: asyncio.Future[None]) -> None:
        def started() -> None:
            if not up.done():
                up.set_result(None)

        await self._main(started)

    async def wait(self) -> None:
        """Until `main` ends; raises what ended it."""
        if self._task is not None:
            await asyncio.shield(self._task)

    async def stop(self) -> None:
        """Cancel `main` and wait until it is gone. What it died of is not raised again here."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()
