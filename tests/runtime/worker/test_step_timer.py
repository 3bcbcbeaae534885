from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from runtime.worker.device import DeviceThread
from runtime.worker.step_timer import StepTimer
from serve import Engine


@pytest.fixture(params=[False, True], ids=["one thread", "separate reads"])
async def thread(request: pytest.FixtureRequest) -> AsyncIterator[DeviceThread]:
    thread = DeviceThread(asyncio.get_running_loop(), separate_reads=request.param)
    yield thread
    await asyncio.to_thread(thread.close)


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def busy(self, seconds: float, launch_s: float = 0.0):
        """Return work that takes this long after its launch."""

        def enqueue():
            self.wait(launch_s)
            return lambda: self.wait(seconds)

        return enqueue

    def wait(self, seconds: float) -> None:
        self.now += seconds


async def test_a_busy_device_and_an_idle_one_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr("runtime.worker.step_timer.perf_counter", lambda: clock.now)
    thread, timer = DeviceThread(asyncio.get_running_loop(), separate_reads=False), StepTimer(None)
    thread.around = timer.around
    for step in [thread.submit(clock.busy(2.0)) for _ in range(3)]:
        await step
    clock.wait(6.0)
    await thread.submit(clock.busy(0.5, launch_s=0.5))
    assert timer.steps == [(2.0, 0.0, 0.0), (2.0, 2.0, 0.0), (2.0, 2.0, 0.0), (1.0, 8.0, 0.5)]
    assert timer.shares() == [1.0, 1.0, 0.25]
    await asyncio.to_thread(thread.close)


async def test_a_failed_step_is_not_counted_and_its_error_is_raised(thread: DeviceThread):
    timer = StepTimer(None)
    thread.around = timer.around

    def boom() -> int:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        await thread.submit(lambda: boom)
    assert await thread.submit(lambda: lambda: 5) == 5
    assert len(timer.steps) == 1


async def test_an_engines_steps_are_timed():
    async with Engine() as engine:
        [runner] = engine.core.runners
        timer = runner.time_steps()  # pyright: ignore[reportAttributeAccessIssue]
        await engine.generate("Once", {"max_new_tokens": 8, "ignore_eos": True})
        assert len(timer.steps) >= 8
        assert all(0 < share <= 1 for share in timer.shares())
