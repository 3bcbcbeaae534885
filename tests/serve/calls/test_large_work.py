"""Large bodies take turns on a few threads, so that the event loop does not wait for many threads."""

from __future__ import annotations

import threading

import anyio

from serve.calls.body import LARGE_THREADS, off_loop


async def test_large_work_runs_on_a_few_threads_at_a_time() -> None:
    running, most, lock = 0, 0, threading.Lock()
    full = threading.Barrier(LARGE_THREADS)

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        full.wait(60)  # all threads are used
        with lock:
            running -= 1

    async with anyio.create_task_group() as group:
        for _ in range(4 * LARGE_THREADS):
            group.start_soon(lambda: off_loop(work, small=False, large=True))
    assert most == LARGE_THREADS
