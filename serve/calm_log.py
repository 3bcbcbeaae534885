"""A bound on how much clients can write into the log."""

from __future__ import annotations

import logging
import time

WINDOW_S = 10.0
MAX_ALIKE = 5  # records of one kind in a window


class CalmLog(logging.Filter):
    """Lets `MAX_ALIKE` warnings or errors with the same text before formatting pass in `WINDOW_S` seconds.

    The first one after that says how many were left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[str, _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        now_s = time.monotonic()
        window = self._windows.setdefault(str(record.msg)[:200], _Window(now_s))
        if now_s - window.start_s >= WINDOW_S:
            left_out, window.start_s, window.num_records = window.num_records - MAX_ALIKE, now_s, 0
            if left_out > 0:
                record.msg = f"{record.msg} ({left_out} more like this were left out)"
        window.num_records += 1
        return window.num_records <= MAX_ALIKE


class _Window:
    __slots__ = ("num_records", "start_s")

    def __init__(self, start_s: float) -> None:
        self.start_s = start_s
        self.num_records = 0
