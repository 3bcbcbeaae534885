"""Signals to the server's process: the first signal requests a graceful end, the second an immediate end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator

logger = logging.getLogger("penstock.server")

NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
FORCED_S = 1.0  # seconds from the second signal to the end of the process, even if work still runs


class Signals:
    """Receives the process's signals. A first signal during the start cancels the start."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()  # set by the first signal; running requests may finish
        self.forced = asyncio.Event()  # set by the second signal; running requests are ended
        self.number = 0  # number of the latest signal; 0 before the first
        self._starting = asyncio.current_task()

    def started(self) -> None:
        """Mark the start as complete: from now on, a first signal only sets `requested`."""
        self._starting = None

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Call `arrived` for each signal while the `with` block runs; ignore the signals afterwards."""
        loop = asyncio.get_running_loop()
        numbers = [number for number in NUMBERS if not _is_ignored_hangup(number)]
        for number in numbers:
            loop.add_signal_handler(number, self.arrived, number)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)
                # A later signal must not end the process before its files and workers are cleaned up.
                signal.signal(number, signal.SIG_IGN)

    def arrived(self, number: int) -> None:
        """Handle one signal: request a graceful end, or force the end if one was already requested."""
        self.number = number
        if not self.requested.is_set():
            self.requested.set()
            if self._starting is not None:
                self._starting.cancel()
            return
        if not self.forced.is_set():
            self.forced.set()
            exit_after(FORCED_S, 128 + number)


def _is_ignored_hangup(number: signal.Signals) -> bool:
    """Whether the signal is SIGHUP and the process ignores it, for example because of nohup."""
    return number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN


def exit_after(delay_s: float, status: int) -> None:
    """End the process after the delay, unless it has already ended."""

    def end() -> None:
        sys.stderr.flush()
        os._exit(status)

    timer = threading.Timer(delay_s, end)
    timer.daemon = True
    timer.start()
