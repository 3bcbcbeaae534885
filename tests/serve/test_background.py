from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable

import anyio
import pytest

from serve.background import BackgroundTask, background_tasks


class Main:
    def __init__(self, *, fail: Exception | None = None) -> None:
        self.fail = fail
        self.tasks: list[asyncio.Task | None] = []
        self.left = asyncio.Event()

    async def __call__(self, started: Callable[[], None]) -> None:
        self.tasks.append(asyncio.current_task())
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(anyio.sleep_forever)
                if self.fail is not None:
                    raise self.fail
                started()
        finally:
            self.tasks.append(asyncio.current_task())
            self.left.set()


async def in_another_task(coroutine_function: Callable) -> None:
    await asyncio.create_task(coroutine_function())


async def test_tree_is_entered_and_left_by_its_own_task_whoever_signals():
    main = Main()
    background = BackgroundTask(main)
    await in_another_task(background.start)
    assert background.running
    await in_another_task(background.stop)
    assert main.left.is_set()
    assert not background.running
    assert main.tasks[0] is main.tasks[1] is not asyncio.current_task()


async def test_failure_to_start_is_raised_to_the_starter():
    with pytest.raises(ExceptionGroup) as caught:
        await BackgroundTask(Main(fail=ValueError("no weights"))).start()
    assert caught.group_contains(ValueError, match="no weights")


async def test_cancelled_start_leaves_nothing_running():
    reached, main_left = asyncio.Event(), asyncio.Event()

    async def never_up(started: Callable[[], None]) -> None:
        reached.set()
        try:
            await anyio.sleep_forever()
        finally:
            main_left.set()

    starting = asyncio.create_task(BackgroundTask(never_up).start())
    await reached.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert main_left.is_set()


async def test_stop_twice_does_nothing_the_second_time():
    background = BackgroundTask(Main())
    await background.start()
    await background.stop()
    await background.stop()


class SlowToLeave:
    """A context that needs several turns of the event loop to close, and records when it has closed."""

    def __init__(self) -> None:
        self.leaving, self.may_leave, self.left = asyncio.Event(), asyncio.Event(), False

    async def __call__(self, started: Callable[[], None]) -> None:
        started()
        try:
            await anyio.sleep_forever()
        finally:
            self.leaving.set()
            await self.may_leave.wait()
            self.left = True


async def test_stop_that_is_cancelled_repeatedly_still_ends_the_task():
    main = SlowToLeave()
    background = BackgroundTask(main)
    await background.start()
    stopping = asyncio.create_task(background.stop())
    await main.leaving.wait()
    for _ in range(3):
        stopping.cancel()
        await asyncio.sleep(0)
    assert not stopping.done()
    main.may_leave.set()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    assert main.left
    assert not background.running


async def test_stop_in_a_cancelled_scope_still_ends_the_task():
    main = SlowToLeave()
    background = BackgroundTask(main)
    await background.start()
    with anyio.CancelScope() as scope:
        scope.cancel()
        asyncio.get_running_loop().call_later(0.01, main.may_leave.set)
        await background.stop()
    assert main.left


async def test_second_stop_waits_for_the_first():
    main = SlowToLeave()
    background = BackgroundTask(main)
    await background.start()
    first = asyncio.create_task(background.stop())
    await main.leaving.wait()
    second = asyncio.create_task(background.stop())
    await asyncio.sleep(0)
    assert not second.done()
    main.may_leave.set()
    await asyncio.gather(first, second)
    assert main.left


async def test_block_that_is_cancelled_repeatedly_still_ends_its_tasks():
    main = SlowToLeave()

    async def block() -> None:
        async with background_tasks(main(lambda: None)):
            await anyio.sleep_forever()

    task = asyncio.create_task(block())
    for _ in range(4):
        await asyncio.sleep(0)
        task.cancel()
    assert not task.done()
    main.may_leave.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert main.left


async def test_task_that_fails_when_cancelled_is_not_reported_as_unretrieved():
    async def fails_when_cancelled() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            raise ValueError("nobody asks for this")

    reports: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context["message"]))
    async with background_tasks(fails_when_cancelled()):
        await asyncio.sleep(0)
    gc.collect()  # a task reports its error when it is deleted
    assert reports == []
