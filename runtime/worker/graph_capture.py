"""Work that makes later steps faster, done between steps: one piece at a time, so that nobody waits long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from runtime.worker.device_stream import Collect, DeviceStream, Ticket

logger = logging.getLogger("penstock.core")

PACE = 64  # steps between two pieces while there is always something to compute
QUIET_S = 0.05  # without a step before the next piece: a client that answers at once is not idle


class Chores:
    """Has `work` done on the device thread until it says that nothing is left.

    The first piece waits for the first step to be done, so that no first token waits for any. Later ones are
    done while nothing runs, and every `pace` steps where something always runs. A piece that fails is the last
    one: the error is logged, and steps go on as they are. Belongs to the loop.
    """

    def __init__(
        self,
        stream: DeviceStream,
        work: Callable[[], bool],
        *,
        pace: int = PACE,
        quiet_s: float = QUIET_S,
    ) -> None:
        self._stream = stream
        self._work: Callable[[], bool] | None = work  # None: nothing is left
        self._pace = pace
        self._quiet_s = quiet_s
        self._busy = False  # a piece is on its way
        self._num_in_flight = 0
        self._num_steps = 0  # since the last piece
        self._loop = asyncio.get_running_loop()

    @property
    def left(self) -> bool:
        """Whether there is work that was not done yet."""
        return self._work is not None

    def note_step(self, step: Ticket) -> None:
        """After every launched step."""
        if self._work is None:
            return
        self._num_in_flight += 1
        self._num_steps += 1
        step.when_done(self._step_done)

    def close(self) -> None:
        """Start no further piece and let go of the work."""
        self._work = None

    def _step_done(self, error: BaseException | None) -> None:
        self._num_in_flight -= 1
        if self._num_steps >= self._pace:
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
        work = self._work
        if self._busy or work is None or self._stream.closed:
            return
        self._busy = True
        self._num_steps = 0
        self._stream.submit(lambda: self._run(work)).when_done(self._piece_done)

    def _run(self, work: Callable[[], bool]) -> Collect[None]:
        if not work():
            self._work = None
        return lambda: None

    def _piece_done(self, error: BaseException | None) -> None:
        self._busy = False
        if error is not None:
            self._work = None
            logger.error(
                "Preparing faster steps failed; what is not prepared runs as before.", exc_info=error
            )
        elif not self._num_in_flight:
            self._start_if_quiet()
