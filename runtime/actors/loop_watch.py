"""Measures the lag of the event loop, and warns of slow garbage collections."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from runtime.metrics.series import Histogram

logger = logging.getLogger("penstock.core")

PERIOD_S = 0.05


@contextmanager
def gc_watched(threshold_s: float) -> Iterator[None]:
    """Warn of garbage collections, in any thread, that take longer than `threshold_s`; 0.0 means never."""
    if threshold_s <= 0:
        yield
        return
    began_s = 0.0

    def note(phase: str, info: Mapping[str, int]) -> None:
        nonlocal began_s
        if phase == "start":
            began_s = time.perf_counter()
        elif (seconds := time.perf_counter() - began_s) > threshold_s:
            logger.warning(
                "Garbage collection of generation %d took %.3f s and freed %d objects (--gc-warning-threshold-secs).",
                info["generation"],
                seconds,
                info["collected"],
            )

    gc.callbacks.append(note)
    try:
        yield
    finally:
        gc.callbacks.remove(note)


async def watch_loop(lag_s: Histogram) -> None:
    """Record in `lag_s` by how many seconds timers fire late, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + PERIOD_S
        await asyncio.sleep(PERIOD_S)
        lag_s.observe(max(loop.time() - due_s, 0.0))
