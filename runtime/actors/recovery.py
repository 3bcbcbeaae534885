"""Recovers a scheduler actor from failed steps and from exceptions of its scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection

from runtime.actors.detokenizer import DetokenizerActor
from runtime.actors.live_requests import LiveRequests
from runtime.actors.steps_in_flight import StepsInFlight
from runtime.errors import NotFinite, OutOfMemory, StepFailed
from runtime.request import Delta
from runtime.scheduler.apply import NOT_FINITE, RowFailed
from runtime.scheduler.scheduler import Scheduler

logger = logging.getLogger("penstock.scheduler")

BROKEN = "The scheduler failed while processing this request. Other requests continue."
STEP_FAILED = "The forward pass failed, and the request cannot be completed."
NO_MEMORY = "The device ran out of memory. This request, the newest one, was ended so that others can continue."


class Recovery:
    """Ends the requests that cause failures. All other requests continue."""

    def __init__(
        self, scheduler: Scheduler, steps: StepsInFlight, requests: LiveRequests, detokenizer: DetokenizerActor
    ) -> None:
        self._scheduler = scheduler
        self._steps = steps
        self._requests = requests
        self._detokenizer = detokenizer
        self._num_broken = 0  # number of scheduler exceptions since the last applied step

    def note_applied(self) -> None:
        """Record that a step was applied without an exception."""
        self._num_broken = 0

    def fail_broken(self, deltas: list[Delta]) -> list[Delta]:
        """Fail the requests whose logits were not finite (NaN or infinite). Return the deltas of all other requests."""
        broken = {
            delta.request_id for delta in deltas if delta.finish is not None and delta.finish.message == NOT_FINITE
        }
        for request_id in broken:
            logger.error("The logits of request %d are not finite.", request_id)
            self._requests.fail(request_id, NotFinite(NOT_FINITE))
        return [delta for delta in deltas if delta.request_id not in broken]

    async def after_failed_step(self, error: Exception) -> None:
        """Recover from a failed step: the cache is emptied, and all running sequences are recomputed.

        If the device ran out of memory, the newest request of the step fails. Otherwise trial steps with fewer requests
        find the request that causes the failure, and only this request fails.
        """
        logger.error("A step failed; running sequences are recomputed.", exc_info=error)
        batches = self._steps.batches
        self._steps.pop()
        await self._steps.drain()
        if isinstance(error, OutOfMemory):
            lost, reason = self._scheduler.give_up_newest(batches), OutOfMemory(NO_MEMORY)
        else:
            lost, reason = self._scheduler.fail(batches), StepFailed(STEP_FAILED)
        for request_id in lost:
            self._requests.fail(request_id, reason)

    async def after_exception(self, error: Exception, failed: Collection[int] = ()) -> None:
        """Recover from an exception in the scheduler: rebuild its tables and recompute all running sequences.

        If the exception came from one row, the row's request fails. Otherwise the first exception ends no request. If
        there are further exceptions before a step succeeds, each one ends the newest request, which is the most likely
        cause.
        """
        logger.error("The scheduler failed; running sequences are recomputed.", exc_info=error)
        await self._steps.drain()
        lost: set[int] = set()
        if isinstance(error, RowFailed):
            lost = {error.request_id}
            others = [delta for delta in error.deltas if delta.request_id != error.request_id]
            if deltas := self.fail_broken(others) if failed else others:
                self._detokenizer.inbox.put(deltas)
        elif self._num_broken:
            lost = {max((sequence.request.id for sequence in self._scheduler), default=-1)}
        self._num_broken += 1
        self._scheduler.rebuild(lost)
        await asyncio.sleep(0)
        for request_id in lost:
            self._requests.fail(request_id, StepFailed(BROKEN))
