"""Signals to the server's process: the first asks it to end, the second makes it end now."""

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

NUMBERS = (signal.SIGTERM, signal.SIGINT)
FORCED_S = 1.0  # from a second signal to the end of the process, whatever still runs


class Signals:
    """What arrived since the start. A first signal during the start cancels it."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()  # by a first signal: finish what runs
        self.forced = asyncio.Event()  # by a second one: end it
        self.number = 0  # of the latest; 0 before the first
        self._starting = asyncio.current_task()

    def started(self) -> None:
        """From here on a first signal only sets `asked`."""
        self._starting = None

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """Handle the signals while the block runs."""
        loop = asyncio.get_running_loop()
        for number in NUMBERS:
            loop.add_signal_handler(number, self.arrived, number)
        try:
            yield
        finally:
            for number in NUMBERS:
                loop.remove_signal_handler(number)
                # What comes after it must not end the process before its files and workers are gone.
                signal.signal(number, signal.SIG_IGN)

    def arrived(self, number: int) -> None:
        """A signal came."""
        self.number = number
        if not self.asked.is_set():
            self.asked.set()
            if self._starting is not None:
                self._starting.cancel()
            return
        if not self.forced.is_set():
            self.forced.set()
            exit_after(FORCED_S, 128 + number)


def exit_after(delay_s: float, status: int) -> None:
    """End the process then, if it has not ended by itself."""

    def end() -> None:
        sys.stderr.flush()
        os._exit(status)

    timer = threading.Timer(delay_s, end)
    timer.daemon = True
    timer.start()
