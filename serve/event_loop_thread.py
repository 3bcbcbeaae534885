"""Where an engine runs: a background task on its caller's event loop, or an event loop in a thread of its own.

`Engine` uses `BackgroundTask`: a task group must be left by the task that entered it, while notebook cells,
fixtures and web frameworks enter in one task and leave in another. `SyncEngine` uses `event_loop_thread`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread

import anyio
from anyio.from_thread import BlockingPortal

from runtime.errors import EngineClosed


class BackgroundTask:
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
        """Cancel `main` and wait until it has ended. What it raised is not raised again here.

        The wait is shielded: cancelled, however often, it still ends only when `main` has ended, and raises
        `CancelledError` then.
        """
        task = self._task
        if task is None:
            return
        if not task.cancelling():  # a second cancellation would interrupt the shutdown of `main`
            task.cancel()
        cancelled: asyncio.CancelledError | None = None
        with anyio.CancelScope(shield=True):
            while not task.done():
                try:
                    await asyncio.wait([task])
                except asyncio.CancelledError as error:
                    cancelled = error
        if self._task is task:  # not started again meanwhile
            self._task = None
        if not task.cancelled():
            task.exception()  # marks it as retrieved
        if cancelled is not None:
            raise cancelled


@contextmanager
def event_loop_thread(name: str) -> Iterator[BlockingPortal]:
    """Run a new event loop in a new thread; yields the portal that calls into it.

    Leaving the context ends the loop and the thread. The thread is a daemon, unlike that of anyio's own
    portals, so that an interpreter can exit while the context is still open.
    """
    opened: Future[BlockingPortal] = Future()
    thread = Thread(target=anyio.run, args=(_run_portal, opened), name=name, daemon=True)
    thread.start()
    portal = opened.result()
    try:
        yield portal
    finally:
        portal.call(portal.stop)
        thread.join()


async def _run_portal(opened: Future[BlockingPortal]) -> None:
    async with BlockingPortal() as portal:
        opened.set_result(portal)
        await portal.sleep_until_stopped()
