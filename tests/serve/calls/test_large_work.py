"""Large bodies take turns, so that the event loop does not wait for many threads."""

from __future__ import annotations

import threading

import anyio

from serve.calls.body import off_loop


async def test_large_work_runs_on_one_thread_at_a_time() -> None:
    running, most, calls = 0, 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, most, calls
        with lock:
            running, calls = running + 1, calls + 1
            most = max(most, running)
        threading.Event().wait(0.002)  # another thread could begin meanwhile
        with lock:
            running -= 1

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(lambda: off_loop(work, small=False, large=True))
    assert (most, calls) == (1, 8)
