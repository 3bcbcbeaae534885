from __future__ import annotations

import asyncio
import threading
from typing import Any, cast

import pytest
import torch

from runtime.errors import EngineClosed
from runtime.worker.device import DeviceThread, abandon_capture


@pytest.fixture(params=[False, True], ids=["one thread", "separate reads"])
async def thread(request: pytest.FixtureRequest):
    thread = DeviceThread(asyncio.get_running_loop(), separate_reads=request.param)
    yield thread
    await asyncio.to_thread(thread.close)


async def test_results_arrive_in_order_and_off_the_loop(thread: DeviceThread):
    seen: list[tuple[int, str]] = []

    def launch(number: int):
        seen.append((number, threading.current_thread().name))
        return lambda: number * 10

    futures = [thread.submit(lambda number=number: launch(number)) for number in range(20)]
    assert [await future for future in futures] == [number * 10 for number in range(20)]
    assert [number for number, _ in seen] == list(range(20))
    assert {name for _, name in seen} == {"penstock-device"}


@pytest.mark.parametrize("where", ["enqueue", "read"])
async def test_error_is_raised_where_it_is_awaited_and_the_thread_goes_on(thread: DeviceThread, where: str):
    def boom() -> int:
        raise ValueError("boom")

    failed = thread.submit(cast(Any, boom) if where == "enqueue" else (lambda: boom))
    after = thread.submit(lambda: lambda: 1)
    with pytest.raises(ValueError, match="boom"):
        await failed
    assert await after == 1


async def test_cancelling_the_wait_does_not_cancel_the_work(thread: DeviceThread):
    release = threading.Event()
    future = thread.submit(lambda: lambda: release.wait(10))

    async def wait() -> bool:
        return await asyncio.shield(future)

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    release.set()
    assert await future is True


async def test_closed_thread_takes_nothing_and_leaves_no_thread():
    before = set(threading.enumerate())
    thread = DeviceThread(asyncio.get_running_loop(), separate_reads=True)
    await asyncio.to_thread(thread.close)
    assert set(threading.enumerate()) <= before | {t for t in threading.enumerate() if "penstock" not in t.name}
    with pytest.raises(EngineClosed):
        thread.submit(lambda: lambda: None)


@pytest.mark.parametrize("broken", [True, False])
def test_allocator_learns_that_a_broken_capture_is_over(broken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[int, tuple[int, int]]] = []

    class BrokenGraph:
        def capture_end(self) -> None:
            if broken:  # torch raises this before it tells the allocator that the capture has ended
                raise RuntimeError("operation failed due to a previous error during capture")

    def end(device: int, pool: tuple[int, int]) -> None:
        told.append((device, pool))
        raise RuntimeError("not currently recording to this pool")  # the caller's own error must not be lost

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end)
    graph: Any = BrokenGraph()
    abandon_capture(graph, torch.device("cuda", 1), (3, 0))
    assert told == ([(1, (3, 0))] if broken else [])
