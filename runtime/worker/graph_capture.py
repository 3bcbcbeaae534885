"""Captures CUDA graphs in the background: one graph at a time, between steps."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from runtime.worker.device import DeviceThread, Read

logger = logging.getLogger("penstock.core")

STEPS_BETWEEN = 64  # under constant load, one graph is captured after this number of steps, even if no step needed it
# Under constant load, a graph is captured as soon as this number of steps lacked one. A capture takes about as long as
# this many steps.
STEPS_MISSED = 8
# Idle time before the next capture, in seconds; longer than the pause of a client that replies immediately.
QUIET_S = 0.05


class BackgroundCapture:
    """Calls `capture_next` on the device thread as long as `is_waiting` returns true. Steps can request further graphs.

    The first capture starts after the first step, so that no first token waits for a capture. Later captures run while
    no step runs. Under constant load, a capture runs every `steps_between` steps, or as soon as `num_missed`, the
    number of steps that lacked a graph since the last capture, reaches `steps_missed`. If a capture fails, the error is
    logged and no further graph is captured. Must be called on the event loop.
    """

    def __init__(
        self,
        thread: DeviceThread,
        capture_next: Callable[[], object],
        is_waiting: Callable[[], bool],
        *,
        num_missed: Callable[[], int] = lambda: 0,
        steps_between: int = STEPS_BETWEEN,
        steps_missed: int = STEPS_MISSED,
        quiet_s: float = QUIET_S,
    ) -> None:
        self._thread = thread
        self._capture_next: Callable[[], object] | None = capture_next  # None after a failure or after `close`
        self._is_waiting = is_waiting
        self._num_missed = num_missed
        self._steps_between, self._steps_missed = steps_between, steps_missed
        self._quiet_s = quiet_s
        self._capturing = False
        self._num_in_flight = 0
        self._num_steps = 0  # number of steps since the last capture
        self._loop = asyncio.get_running_loop()

    @property
    def is_pending(self) -> bool:
        """Whether a graph remains to be captured."""
        return self._capture_next is not None and self._is_waiting()

    def note_step(self, step: asyncio.Future) -> None:
        """Record a launched step."""
        if not self.is_pending:
            return
        self._num_in_flight += 1
        self._num_steps += 1
        step.add_done_callback(self._step_done)

    def close(self) -> None:
        """End the captures, and drop the reference to the graphs."""
        self._capture_next = None

    def _step_done(self, step: asyncio.Future) -> None:
        self._num_in_flight -= 1
        if self._num_steps >= self._steps_between or self._num_missed() >= self._steps_missed:
            self._start()
        elif not self._num_in_flight:
            self._start_if_quiet()

    def _start_if_quiet(self) -> None:
        num_steps = self._num_steps

        def start() -> None:
            if not self._num_in_flight and self._num_steps == num_steps:
                self._start()

        self._loop.call_later(self._quiet_s, start)

    def _start(self) -> None:
        capture_next = self._capture_next
        if self._capturing or capture_next is None or not self._is_waiting() or self._thread.closed:
            return
        self._capturing = True
        self._num_steps = 0
        self._thread.submit(lambda: self._capture(capture_next)).add_done_callback(self._captured)

    def _capture(self, capture_next: Callable[[], object]) -> Read[None]:
        capture_next()
        return lambda: None

    def _captured(self, capture: asyncio.Future[None]) -> None:
        self._capturing = False
        error = capture.exception()
        if error is not None:
            self._capture_next = None
            logger.error("A graph could not be captured. Its steps run without a graph.", exc_info=error)
        elif not self._num_in_flight:
            self._start_if_quiet()
