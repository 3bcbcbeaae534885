"""Taking pages from a running sequence when there are not enough for all."""

from __future__ import annotations

from runtime.scheduler.budget import NewTokenRatio
from runtime.scheduler.queue import WaitingQueue
from runtime.scheduler.running import Running


class Retraction:
    """Sends sequences back to the head of the queue; they keep their tokens and are computed again later."""

    def __init__(self, running: Running, waiting: WaitingQueue, ratio: NewTokenRatio) -> None:
        self.count = 0
        self._running = running
        self._waiting = waiting
        self._ratio = ratio

    def retract_one(self) -> bool:
        """Retract who loses least: fewest output tokens, then longest prompt, then latest admitted.

        False when only one is left: one sequence alone always fits.
        """
        if len(self._running) < 2:
            return False
        victim = min(
            reversed(list(self._running)),
            key=lambda sequence: (sequence.num_output, -sequence.num_prompt),
        )
        self._running.leave(victim)
        self._waiting.put_back(victim)
        self._ratio.lift(self._running)
        self.count += 1
        return True
