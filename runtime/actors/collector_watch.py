"""A warning when Python's garbage collector holds everything up."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

logger = logging.getLogger("penstock.core")


@contextmanager
def collector_watched(threshold_s: float) -> Iterator[None]:
    """Meanwhile, warn of every collection that takes longer; 0.0 watches nothing. Collections of any thread count."""
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
