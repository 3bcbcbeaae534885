"""A progress bar of one line on stderr; silent when nobody watches."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import TextIO

WIDTH = 30
EVERY_S = 0.1


class Progress:
    """Counts up to `total`. A context manager; leaves the finished line standing."""

    def __init__(self, total: int, what: str, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._shown = self._stream.isatty() and total > 0
        self._total = total
        self._what = what
        self._done = 0
        self._start_s = self._drawn_s = perf_counter()

    def __enter__(self) -> Progress:
        self._draw()
        return self

    def __exit__(self, *_: object) -> None:
        self._draw()
        if self._shown:
            self._stream.write("\n")

    def advance(self) -> None:
        self._done += 1
        if self._shown and perf_counter() - self._drawn_s >= EVERY_S:
            self._draw()

    def _draw(self) -> None:
        if not self._shown:
            return
        self._drawn_s = perf_counter()
        full = WIDTH * self._done // self._total
        bar = "#" * full + "." * (WIDTH - full)
        elapsed_s = self._drawn_s - self._start_s
        self._stream.write(f"\r{self._what} [{bar}] {self._done}/{self._total} {elapsed_s:.0f} s ")
        self._stream.flush()
