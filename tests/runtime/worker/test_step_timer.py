from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from runtime.worker.device_stream import DeviceStream
from runtime.worker.step_timer import Occupancy
from serve import Engine


@pytest.fixture(params=[False, True], ids=["one thread", "separate collect"])
async def stream(request: pytest.FixtureRequest) -> AsyncIterator[DeviceStream]:
    stream = DeviceStream(asyncio.get_running_loop(), separate_collect=request.param)
    yield stream
    await asyncio.to_thread(stream.close)


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def busy(self, seconds: float):
        """A launch whose work takes so long."""
        return lambda: lambda: self.wait(seconds)

    def wait(self, seconds: float) -> None:
        self.now += seconds


async def test_a_busy_device_and_an_idle_one_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr("runtime.worker.step_timer.perf_counter", lambda: clock.now)
    stream, occupancy = DeviceStream(asyncio.get_running_loop(), separate_collect=False), Occupancy(None)
    stream.around = occupancy.around
    for ticket in [stream.submit(clock.busy(2.0)) for _ in range(3)]:
        await ticket.result()
    clock.wait(6.0)
    await stream.submit(clock.busy(1.0)).result()
    assert occupancy.steps == [(2.0, 0.0), (2.0, 2.0), (2.0, 2.0), (1.0, 8.0)]
    assert occupancy.shares() == [1.0, 1.0, 0.25]
    await asyncio.to_thread(stream.close)


async def test_a_failed_step_is_not_counted_and_its_error_is_raised(stream: DeviceStream):
    occupancy = Occupancy(None)
    stream.around = occupancy.around

    def boom() -> int:
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        await stream.submit(lambda: boom).result()
    assert await stream.submit(lambda: lambda: 5).result() == 5
    assert len(occupancy.steps) == 1


async def test_an_engines_steps_are_timed():
    async with Engine() as engine:
        [runner] = engine.core.runners
        occupancy = runner.measure()  # pyright: ignore[reportAttributeAccessIssue]
        await engine.generate("Once", {"max_new_tokens": 8, "ignore_eos": True})
        assert len(occupancy.steps) >= 8
        assert all(0 < share <= 1 for share in occupancy.shares())
