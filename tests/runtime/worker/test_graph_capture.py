from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from runtime.worker.device_stream import DeviceStream
from runtime.worker.graph_capture import Chores


class Work:
    """So many pieces; notes what was done by when."""

    def __init__(self, pieces: int) -> None:
        self.left = pieces
        self.error: Exception | None = None

    def __call__(self) -> bool:
        if self.error is not None:
            raise self.error
        self.left -= 1
        return self.left > 0


@asynccontextmanager
async def stream() -> AsyncIterator[DeviceStream]:
    made = DeviceStream(asyncio.get_running_loop(), separate_collect=True)
    try:
        yield made
    finally:
        await asyncio.to_thread(made.close)


async def step(stream: DeviceStream, chores: Chores) -> None:
    ticket = stream.submit(lambda: lambda: None)
    chores.note_step(ticket)
    await ticket.result()


async def until_done(work: Work) -> None:
    while work.left:
        await asyncio.sleep(0)


async def test_nothing_is_done_before_the_first_step_and_all_in_the_quiet_after_it():
    async with stream() as device:
        work = Work(3)
        chores = Chores(device, work, quiet_s=0)
        await device.submit(lambda: lambda: None).result()
        await asyncio.sleep(0)
        assert work.left == 3
        await step(device, chores)
        await until_done(work)


async def test_one_piece_every_so_many_steps_where_it_is_never_quiet():
    async with stream() as device:
        work = Work(10)
        chores = Chores(device, work, pace=4, quiet_s=3600)
        for _ in range(12):
            await step(device, chores)
        await device.submit(lambda: lambda: None).result()
        assert work.left == 7


async def test_steps_go_on_when_a_piece_fails(caplog: pytest.LogCaptureFixture):
    async with stream() as device:
        work = Work(5)
        work.error = RuntimeError("no such kernel")
        chores = Chores(device, work, pace=1, quiet_s=0)
        with caplog.at_level(logging.ERROR, "penstock.core"):
            await step(device, chores)
            while not caplog.records:
                await asyncio.sleep(0)
        work.error = None
        for _ in range(3):
            await step(device, chores)
        assert work.left == 5


async def test_closed_chores_start_nothing_more():
    async with stream() as device:
        work = Work(5)
        chores = Chores(device, work, pace=1, quiet_s=0)
        chores.close()
        await step(device, chores)
        await device.submit(lambda: lambda: None).result()
        assert work.left == 5
