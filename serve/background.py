"""Background tasks and event loops that end completely when their owner stops them.

`Engine` runs in a `BackgroundTask`: a task group must be entered and left by the same task, but notebook cells,
fixtures and web frameworks start an engine in one task and stop it in another. `SyncEngine` runs in an
`event_loop_thread`.
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

    `main` calls `started()` when it is ready, and then runs until it is cancelled.
    """

    def __init__(self, main: Callable[[Callable[[], None]], Awaitable[None]]) -> None:
        self._main = main
        self._task: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        return self._task is not None and not self._task.done()

    async def start(self) -> None:
        """Start `main`, and return when it is ready. If `main` fails first, raise its exception.

        If `start` is cancelled, it ends `main` before it raises `CancelledError`.
        """
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
        """Wait until `main` ends. Raises its exception, if any."""
        if self._task is not None:
            await asyncio.shield(self._task)

    def abandon(self) -> None:
        """Cancel `main` from any thread, without waiting. Does nothing if its event loop is closed."""
        task = self._task
        if task is not None and not task.done():
            with suppress(RuntimeError):  # the loop is closed
                task.get_loop().call_soon_threadsafe(task.cancel)

    async def stop(self) -> None:
        """Cancel `main`, and return when it has ended. Does not raise the exception of `main`.

        If the caller is cancelled, even repeatedly, `stop` still waits until `main` has ended, and then raises
        `CancelledError`.
        """
        if (task := self._task) is None:
            return
        try:
            await cancel_and_wait(task)
        finally:
            if self._task is task:  # `start` may have set a new task in the meantime
                self._task = None


@asynccontextmanager
async def background_tasks(
    *coroutines: Coroutine[Any, Any, Any],
) -> AsyncIterator[tuple[asyncio.Task[Any], ...]]:
    """Run coroutines as tasks while the block runs. When the block ends, cancel the remaining tasks.

    Every HTTP request uses this instead of an anyio task group. A group costs as much time as reading the request, and
    each task that a group cancels leaves a reference cycle, which keeps the request's memory until a garbage
    collection.
    """
    tasks = tuple(asyncio.create_task(coroutine) for coroutine in coroutines)
    try:
        yield tasks
    finally:
        await cancel_and_wait(*tasks)


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel the tasks, and return when all have ended. Does not raise their exceptions.

    If the caller is cancelled, even repeatedly, this function still waits until the tasks have ended, and then raises
    `CancelledError`.
    """
    for task in tasks:
        if not task.cancelling():  # a second cancellation would interrupt the task's shutdown
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
                task.exception()  # retrieve the exception, so that asyncio does not log it


@contextmanager
def event_loop_thread(name: str) -> Iterator[BlockingPortal]:
    """Run a new event loop in a new thread, and yield an anyio portal for calls on this loop.

    Leaving the context ends the loop and the thread. Unlike the thread of `anyio.from_thread.start_blocking_portal`,
    this thread is a daemon: the interpreter can exit while the context is open.
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
    """Return `work()`, called in a daemon thread.

    Use this for calls that may block forever, for example reading the next line from a terminal. If the caller is
    cancelled, the thread is abandoned; it does not delay the end of the process.
    """
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:
            set_outcome = partial(outcome.set_exception, error)
        else:
            set_outcome = partial(outcome.set_result, result)
        with suppress(InvalidStateError):  # the caller was cancelled
            set_outcome()

    Thread(target=run, daemon=True).start()
    return await asyncio.wrap_future(outcome)
