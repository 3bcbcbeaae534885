"""Graph capture in the background: one graph at a time between steps, so that no request waits for all of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from runtime.worker.device import DeviceThread, Read

logger = logging.getLogger("penstock.core")

STEPS_BETWEEN = 64  # two captures, while there is always something to compute
QUIET_S = 0.05  # without a step before the next capture: a client that answers at once is not idle


class BackgroundCapture:
    """Calls `capture_next` on the device thread while something `is_waiting`, which may begin anew at any step.

    The first capture waits for the first step to be done, so that no first token waits for any. Later ones are
    made while nothing runs, and every `steps_between` steps where something always runs. A capture that fails is
    the last one: the error is logged, and steps go on as they are. Belongs to the loop.
    """

    def __init__(
        self,
        thread: DeviceThread,
        capture_next: Callable[[], object],
        is_waiting: Callable[[], bool],
        *,
        steps_between: int = STEPS_BETWEEN,
        quiet_s: float = QUIET_S,
    ) -> None:
        self._thread = thread
        self._capture_next: Callable[[], object] | None = capture_next  # None: it failed, or is closed
        self._is_waiting = is_waiting
        self._steps_between = steps_between
        self._quiet_s = quiet_s
        self._capturing = False
        self._num_in_flight = 0
        self._num_steps = 0  # since the last capture
        self._loop = asyncio.get_running_loop()

    @property
    def is_pending(self) -> bool:
        """Whether a graph is still to be captured."""
        return self._capture_next is not None and self._is_waiting()

    def note_step(self, step: asyncio.Future) -> None:
        """After every launched step."""
        if not self.is_pending:
            return
        self._num_in_flight += 1
        self._num_steps += 1
        step.add_done_callback(self._step_done)

    def close(self) -> None:
        """Start no further capture and let go of the graphs."""
        self._capture_next = None

    def _step_done(self, step: asyncio.Future) -> None:
        self._num_in_flight -= 1
        if self._num_steps >= self._steps_between:
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
            logger.error("A graph was not captured; its steps run without one, as before.", exc_info=error)
        elif not self._num_in_flight:
            self._start_if_quiet()
