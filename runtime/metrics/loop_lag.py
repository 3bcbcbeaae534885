"""How late the event loop is."""

from __future__ import annotations

import asyncio

from runtime.metrics.series import Histogram

PERIOD_S = 0.05


async def watch_loop(lag_s: Histogram) -> None:
    """Until cancelled: ask to be woken, over and over, and note by how much that was late."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        lag_s.observe(max(loop.time() - due_s, 0.0))
