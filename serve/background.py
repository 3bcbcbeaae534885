"""Tasks and event loops in the background that end, completely, when their owner says so.

`Engine` runs in a `BackgroundTask`: a task group must be left by the task that entered it, while notebook cells,
fixtures and web frameworks enter in one task and leave in another. `SyncEngine` runs in an `event_loop_thread`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from threading import Thread
from typing import Any, TypeVar

import anyio
from anyio.from_thread import BlockingPortal

from runtime.errors import EngineClosed

T = TypeVar("T")


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

    def abandon(self) -> None:
        """Cancel `main` from any thread, without waiting. Does nothing where its loop is gone."""
        task = self._task
        if task is not None and not task.done():
            with suppress(RuntimeError):  # the loop is closed
                task.get_loop().call_soon_threadsafe(task.cancel)

    async def stop(self) -> None:
        """Cancel `main` and return when it has ended. What it raised is not raised again here.

        Cancelled, however often, it still waits until `main` has ended, and raises `CancelledError` then.
        """
        if (task := self._task) is None:
            return
        try:
            await cancel_and_wait(task)
        finally:
            if self._task is task:  # not started again meanwhile
                self._task = None


@asynccontextmanager
async def background_tasks(*work: Coroutine[Any, Any, Any]) -> AsyncIterator[tuple[asyncio.Task[Any], ...]]:
    """Tasks that are cancelled when the block ends, which need not wait for any.

    Used for every HTTP request instead of an anyio task group: a group and its scopes cost as much as reading the
    request, and each task that they cancel leaves a reference cycle that holds the request's memory.
    """
    tasks = tuple(asyncio.create_task(one) for one in work)
    try:
        yield tasks
    finally:
        await cancel_and_wait(*tasks)


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks and return when all have ended. What they raised is left to their other readers.

    The wait is shielded: cancelled, however often, it still ends only when the tasks have ended, and raises
    `CancelledError` then.
    """
    for task in tasks:
        if not task.cancelling():  # a second cancellation would interrupt its shutdown
            task.cancel()
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        with anyio.CancelScope(shield=True):
            while not all(task.done() for task in tasks):
                with suppress(asyncio.CancelledError):
                    await asyncio.wait(tasks)
        raise
    finally:
        for task in tasks:
            if task.done() and not task.cancelled():
                task.exception()  # else asyncio reports it as never retrieved


@contextmanager
def event_loop_thread(name: str) -> Iterator[BlockingPortal]:
    """Run a new event loop in a new thread; yields what calls into it.

    Leaving the context ends the loop and the thread. The thread is a daemon, unlike that of anyio's own
    portals, so that an interpreter can exit while the context is still open.
    """
    opened: Future[BlockingPortal] = Future()
    thread = Thread(target=anyio.run, args=(_run_loop, opened), name=name, daemon=True)
    thread.start()
    loop_thread = opened.result()
    try:
        yield loop_thread
    finally:
        loop_thread.call(loop_thread.stop)
        thread.join()


async def _run_loop(opened: Future[BlockingPortal]) -> None:
    async with BlockingPortal() as loop_thread:
        opened.set_result(loop_thread)
        await loop_thread.sleep_until_stopped()


async def run_in_daemon(work: Callable[[], T]) -> T:
    """What `work` returns, from a thread that is left alone when the caller is cancelled and when the process ends.

    For what may wait for ever, such as a terminal's next line.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            set_outcome = partial(outcome.set_exception, error)
        else:
            set_outcome = partial(outcome.set_result, result)
        with suppress(InvalidStateError):  # nobody waits any more
            set_outcome()

    Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(outcome)
