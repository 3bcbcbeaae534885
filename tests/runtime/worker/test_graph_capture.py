from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from runtime.worker.device import DeviceThread
from runtime.worker.graph_capture import BackgroundCapture


class Graphs:
    """A fake with this number of graphs to capture."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.missed = 0  # steps whose graph is not captured yet
        self.error: Exception | None = None

    def capture_next(self) -> None:
        if self.error is not None:
            raise self.error
        self.left -= 1
        self.missed = 0

    def is_waiting(self) -> bool:
        return self.left > 0

    def num_missed(self) -> int:
        return self.missed


@asynccontextmanager
async def thread() -> AsyncIterator[DeviceThread]:
    made = DeviceThread(asyncio.get_running_loop(), separate_reads=True)
    try:
        yield made
    finally:
        await asyncio.to_thread(made.close)


async def step(thread: DeviceThread, capture: BackgroundCapture) -> None:
    future = thread.submit(lambda: lambda: None)
    capture.note_step(future)
    await future


async def until_done(graphs: Graphs) -> None:
    while graphs.left:
        await asyncio.sleep(0)


async def test_nothing_is_captured_before_the_first_step_and_all_in_the_quiet_after_it():
    async with thread() as device:
        graphs = Graphs(3)
        capture = BackgroundCapture(device, graphs.capture_next, graphs.is_waiting, quiet_s=0)
        await device.submit(lambda: lambda: None)
        await asyncio.sleep(0)
        assert graphs.left == 3
        await step(device, capture)
        await until_done(graphs)
        assert not capture.is_pending
        graphs.left = 2  # a step needs further graphs
        await step(device, capture)
        await until_done(graphs)


async def test_one_graph_is_captured_every_so_many_steps_where_it_is_never_quiet():
    async with thread() as device:
        graphs = Graphs(10)
        capture = BackgroundCapture(device, graphs.capture_next, graphs.is_waiting, steps_between=4, quiet_s=3600)
        for _ in range(12):
            await step(device, capture)
        await device.submit(lambda: lambda: None)
        assert graphs.left == 7


async def test_a_graph_that_steps_miss_is_captured_after_few_of_them():
    async with thread() as device:
        graphs = Graphs(10)
        capture = BackgroundCapture(
            device, graphs.capture_next, graphs.is_waiting, num_missed=graphs.num_missed, quiet_s=3600
        )
        for _ in range(20):
            graphs.missed += 1
            await step(device, capture)
        await device.submit(lambda: lambda: None)
        assert graphs.left == 8


async def test_steps_go_on_when_a_capture_fails(caplog: pytest.LogCaptureFixture):
    async with thread() as device:
        graphs = Graphs(5)
        graphs.error = RuntimeError("no such kernel")
        capture = BackgroundCapture(device, graphs.capture_next, graphs.is_waiting, steps_between=1, quiet_s=0)
        with caplog.at_level(logging.ERROR, "penstock.core"):
            await step(device, capture)
            while not caplog.records:
                await asyncio.sleep(0)
        graphs.error = None
        for _ in range(3):
            await step(device, capture)
        assert graphs.left == 5


async def test_closed_capture_starts_nothing_more():
    async with thread() as device:
        graphs = Graphs(5)
        capture = BackgroundCapture(device, graphs.capture_next, graphs.is_waiting, steps_between=1, quiet_s=0)
        capture.close()
        await step(device, capture)
        await device.submit(lambda: lambda: None)
        assert graphs.left == 5
