"""The steps of a replica that were launched and whose results are not applied yet."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

import anyio

from runtime.actors.step_times import Progress
from runtime.batch import Batch, Runner, StepOutput
from runtime.errors import WorkerFailed

logger = logging.getLogger("penstock.scheduler")

WATCHDOG_PERIOD_S = 1.0
STOOD_STILL_S = 0.5  # by which the loop is late


class StepsInFlight:
    """In the order of their launch, which is that of their results. Only the oldest is waited for."""

    def __init__(self, runner: Runner, progress: Progress, watchdog_timeout_s: float) -> None:
        self._runner = runner
        self._progress = progress
        self._watchdog_timeout_s = watchdog_timeout_s
        self._steps: deque[tuple[Batch, asyncio.Future[StepOutput]]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def batches(self) -> list[Batch]:
        """The oldest first."""
        return [batch for batch, _ in self._steps]

    @property
    def age_s(self) -> float:
        """For how long the oldest has been awaited; 0 where there is none."""
        return time.monotonic() - self._progress.last_step_s if self._steps else 0.0

    @property
    def predicted_s(self) -> float | None:
        """How long the oldest should take; None where there is none, or where that is not known."""
        return self._progress.times.predicted_s(self._steps[0][0]) if self._steps else None

    @property
    def hangs(self) -> bool:
        """Whether the oldest has taken much longer than it should."""
        if not self._steps:
            return False
        return self.age_s > self._progress.times.patience_s(self._steps[0][0], self._watchdog_timeout_s)

    def add(self, batch: Batch, result: asyncio.Future[StepOutput]) -> None:
        """A step that was launched behind those that are here."""
        if not self._steps:
            self._progress.last_step_s = time.monotonic()
        self._steps.append((batch, result))
        self._progress.note_launch(batch)

    async def output(self) -> StepOutput:
        """The result of the oldest, which stays here until `pop`. Gives the loop a turn; cancelled, the step goes on.

        Raises what the forward raised.
        """
        _, future = self._steps[0]
        self._runner.finish_oldest()
        if future.done():
            await asyncio.sleep(0)
            return future.result()
        return await asyncio.shield(future)

    def pop(self) -> Batch:
        """Take the oldest out, once its result has come or is given up."""
        batch, _ = self._steps.popleft()
        return batch

    async def let_finish(self) -> None:
        """Wait for all of them and take them out; nothing is wanted of them any more. Raises `WorkerFailed`."""
        while self._steps:
            try:
                await self.output()
            except WorkerFailed:
                raise
            except Exception as another:  # as the step before it, perhaps: its outcome does not matter
                logger.error("a step behind it failed too: %s", another)
            self.pop()

    async def wait_until_overdue(self) -> None:
        """Return when a step has not come back within the watchdog's time.

        Time in which this whole process stood still (stopped, or its machine moved) is not the step's.
        """
        timeout_s = self._watchdog_timeout_s
        period_s = min(WATCHDOG_PERIOD_S, timeout_s / 2) if timeout_s > 0 else WATCHDOG_PERIOD_S
        while not 0 < timeout_s < self.age_s:
            due_s = time.monotonic() + period_s
            await anyio.sleep(period_s)
            late_s = time.monotonic() - due_s
            if late_s > STOOD_STILL_S:
                self._progress.last_step_s = min(self._progress.last_step_s + late_s, time.monotonic())
