from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import pytest

from runtime.errors import EngineClosed
from runtime.worker.device_stream import DeviceStream


@pytest.fixture(params=[False, True], ids=["one thread", "separate collect"])
async def stream(request: pytest.FixtureRequest):
    stream = DeviceStream(asyncio.get_running_loop(), separate_collect=request.param)
    yield stream
    await asyncio.to_thread(stream.close)


async def test_results_arrive_in_order_and_off_the_loop(stream: DeviceStream):
    seen: list[tuple[int, str]] = []

    def launch(number: int):
        seen.append((number, threading.current_thread().name))
        return lambda: number * 10

    tickets = [stream.submit(lambda number=number: launch(number)) for number in range(20)]
    assert [await ticket.result() for ticket in tickets] == [number * 10 for number in range(20)]
    assert [number for number, _ in seen] == list(range(20))
    assert {name for _, name in seen} == {"penstock-device"}


@pytest.mark.parametrize("where", ["launch", "collect"])
async def test_error_is_raised_where_it_is_awaited_and_the_stream_goes_on(stream: DeviceStream, where: str):
    def boom() -> int:
        raise ValueError("boom")

    failed = stream.submit(cast(Any, boom) if where == "launch" else (lambda: boom))
    after = stream.submit(lambda: lambda: 1)
    with pytest.raises(ValueError, match="boom"):
        await failed.result()
    assert await after.result() == 1


async def test_cancelling_the_wait_does_not_cancel_the_work(stream: DeviceStream):
    release = threading.Event()
    ticket = stream.submit(lambda: lambda: release.wait(10))
    waiting = asyncio.create_task(ticket.result())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
    assert await ticket.result() is True


async def test_closed_stream_takes_nothing_and_leaves_no_thread():
    before = set(threading.enumerate())
    stream = DeviceStream(asyncio.get_running_loop(), separate_collect=True)
    await asyncio.to_thread(stream.close)
    assert set(threading.enumerate()) <= before | {
        t for t in threading.enumerate() if "penstock" not in t.name
    }
    with pytest.raises(EngineClosed):
        stream.submit(lambda: lambda: None)
