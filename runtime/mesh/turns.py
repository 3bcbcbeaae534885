"""Turns of two threads: one computes while a collective of the other is in progress."""

from __future__ import annotations

import threading
from typing import Any


class Turns:
    """Lets two threads compute in turns. A thread passes its turn on when it waits for a collective.

    The first thread begins. Turns change only at collectives and at the end of a thread. Therefore all ranks begin the
    collectives of both threads in the same order.
    """

    def __init__(self) -> None:
        self._may_run = (threading.Semaphore(1), threading.Semaphore(0))
        self._numbers: dict[int, int] = {}  # thread identity -> 0 or 1
        self._has_ended = [False, False]

    def enter(self, number: int) -> None:
        """Wait for the first turn of thread `number`, which is the calling thread."""
        self._numbers[threading.get_ident()] = number
        self._may_run[number].acquire()

    def wait(self, work: Any) -> None:
        """Let the other thread compute until it passes the turn back. Then wait for this collective."""
        number = self._numbers[threading.get_ident()]
        if self._has_ended[1 - number]:
            work.wait()
            return
        self._may_run[1 - number].release()
        self._may_run[number].acquire()
        # On a GPU, this call makes the stream wait. Both threads share the stream, so the other thread must first have
        # enqueued its work.
        work.wait()

    def leave(self, number: int) -> None:
        """End thread `number`, which has the turn. The other thread then runs alone."""
        self._has_ended[number] = True
        self._may_run[1 - number].release()
