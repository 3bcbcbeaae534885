"""The steps of a replica that are launched but not applied yet."""

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
STALL_S = 0.5  # if the event loop is delayed by more than this, the whole process was probably suspended


class StepsInFlight:
    """Launched steps in the order of their launch. Results arrive in this order, so only the oldest is awaited."""

    def __init__(self, runner: Runner, progress: Progress, watchdog_timeout_s: float) -> None:
        self._runner = runner
        self._progress = progress
        self._watchdog_timeout_s = watchdog_timeout_s
        self._steps: deque[tuple[Batch, asyncio.Future[StepOutput]]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def batches(self) -> list[Batch]:
        """Batches in flight, oldest first."""
        return [batch for batch, _ in self._steps]

    @property
    def age_s(self) -> float:
        """Seconds since the oldest step began; 0 if no step is in flight."""
        return time.monotonic() - self._progress.last_step_s if self._steps else 0.0

    @property
    def predicted_s(self) -> float | None:
        """Predicted seconds of the oldest step. None if no step is in flight or its time cannot be predicted."""
        return self._progress.times.predicted_s(self._steps[0][0]) if self._steps else None

    @property
    def hangs(self) -> bool:
        """Whether the oldest step takes much longer than predicted."""
        if not self._steps:
            return False
        return self.age_s > self._progress.times.patience_s(self._steps[0][0], self._watchdog_timeout_s)

    def add(self, batch: Batch, result: asyncio.Future[StepOutput]) -> None:
        """Add a step that was just launched."""
        if not self._steps:
            self._progress.note_first_launch(batch)
        self._steps.append((batch, result))
        self._progress.note_launch(batch)

    async def output(self) -> StepOutput:
        """Wait for the result of the oldest step, and return it. The step stays in flight until `pop`.

        Always yields to the event loop. Raises the exception of the forward pass. Cancellation does not stop the step.
        """
        _, future = self._steps[0]
        self._runner.finish_oldest()
        if future.done():
            await asyncio.sleep(0)
            return future.result()
        return await asyncio.shield(future)

    def pop(self) -> Batch:
        """Remove and return the oldest step. Call it when its result has arrived or is not needed."""
        batch, _ = self._steps.popleft()
        return batch

    async def drain(self) -> None:
        """Wait until all steps have ended, and discard their results.

        Raises `WorkerFailed` if a worker fails meanwhile.
        """
        while self._steps:
            try:
                await self.output()
            except WorkerFailed:
                raise
            except Exception as error:  # the results of these steps are discarded, so their errors do not matter
                logger.error("A later step failed too: %s", error)
            self.pop()

    async def wait_until_overdue(self) -> None:
        """Return when a step has not finished within the watchdog's timeout.

        Time during which the whole process was suspended (by a signal, or while its virtual machine moved) does not
        count.
        """
        timeout_s = self._watchdog_timeout_s
        period_s = min(WATCHDOG_PERIOD_S, timeout_s / 2) if timeout_s > 0 else WATCHDOG_PERIOD_S
        while not 0 < timeout_s < self.age_s:
            due_s = time.monotonic() + period_s
            await anyio.sleep(period_s)
            late_s = time.monotonic() - due_s
            if late_s > STALL_S:
                self._progress.last_step_s = min(self._progress.last_step_s + late_s, time.monotonic())
