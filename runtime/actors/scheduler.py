"""The scheduler actor: the step loop. The rules are in `runtime.scheduler`; this is the shell around them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from runtime.actors.mailbox import Mailbox
from runtime.batch import Batch, Runner, StepOutput
from runtime.config.plan import SchedulePlan
from runtime.errors import OutOfMemory, PenstockError, StepFailed, WorkerFailed
from runtime.request import Delta, Finish
from runtime.scheduler.scheduler import Scheduler
from runtime.sequence import Sequence

logger = logging.getLogger("penstock.scheduler")

# Of the loop, from a request's bytes to this inbox: the door's, the tokenizer's, and one to spare.
ARRIVAL_TURNS = 3
MAX_ARRIVAL_TURNS = 50  # however many keep coming

NO_MEMORY = "The device ran out of memory; this request came last and was given up for the others."


class Admit(NamedTuple):
    """New sequences of one request."""

    sequences: list[Sequence]


class Abort(NamedTuple):
    """End a request wherever it is; its reply gets a last chunk with `finish`."""

    request_id: int
    finish: Finish


class StopEarly(NamedTuple):
    """The detokenizer ended a choice; nothing more is to be sent for it."""

    request_id: int
    index: int


class SchedulerActor:
    """Fill, launch, apply, for ever.

    With overlap, step n+1 is filled and launched before the tokens of step n are known. `emit` takes each
    step's deltas; `fail` takes a request id and the error for its sender.
    """

    def __init__(
        self,
        schedule: Scheduler,
        runner: Runner,
        plan: SchedulePlan,
        *,
        page_size: int,
        emit: Callable[[list[Delta]], None],
        fail: Callable[[int, PenstockError], None],
    ) -> None:
        self.inbox: Mailbox[Admit | Abort | StopEarly] = Mailbox()
        self.schedule = schedule
        self.progress = Progress(plan.log_interval_steps, page_size)
        self._runner = runner
        # Steps in flight while the next one is filled: for overlap one, in a pipeline one for each stage.
        self._depth = plan.micro_batches - 1 if plan.micro_batches > 1 else int(plan.overlap)
        self._emit = emit
        self._fail = fail
        self._in_flight: deque[tuple[Batch, asyncio.Future[StepOutput]]] = deque()

    @property
    def busy_since(self) -> float | None:
        """When the oldest step in flight began to be waited for (time.monotonic); None while idle."""
        return self.progress.last_step_s if self._in_flight else None

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self._receive()
            batch = self.schedule.fill()
            if batch is not None:
                self._launch(batch)
            if self._in_flight and (batch is None or len(self._in_flight) > self._depth):
                await self._complete()
            elif batch is None:
                await self.inbox.wait()
                await self._gather()

    async def _gather(self) -> None:
        """Nothing is running: let those in who ask at the same moment, which takes microseconds.

        Otherwise the first would be computed alone, and all the others would wait for that step and, with overlap,
        for the next one.
        """
        num_before, num_quiet = 0, 0
        for _ in range(MAX_ARRIVAL_TURNS):
            num_quiet = num_quiet + 1 if len(self.inbox) == num_before else 0
            if num_quiet == ARRIVAL_TURNS:
                return
            num_before = len(self.inbox)
            await asyncio.sleep(0)

    def _launch(self, batch: Batch) -> None:
        if not self._in_flight:
            self.progress.last_step_s = time.monotonic()
        self._in_flight.append((batch, self._runner.launch(batch)))
        self.progress.note_launch(self.schedule)

    async def _complete(self) -> None:
        batch, step = self._in_flight[0]
        try:
            output = await self._wait(step)
        except WorkerFailed:  # nothing can be computed any more: the owner decides
            raise
        except Exception as error:  # the step boundary: whatever the forward raised costs only its requests
            await self._recover(error)
            return
        self._in_flight.popleft()
        deltas = self.schedule.apply(batch, output)
        if deltas:
            self._emit(deltas)
        self.progress.note_applied(self.schedule, len(batch.sequences))

    async def _wait(self, step: asyncio.Future[StepOutput]) -> StepOutput:
        """The output of the oldest step in flight. Always gives the loop a turn."""
        self._runner.finish_oldest()
        if step.done():
            await asyncio.sleep(0)
            return step.result()
        return await asyncio.shield(step)

    async def _recover(self, error: Exception) -> None:
        """A step failed: what was in flight is lost, the ledger is as new, everything else goes on.

        For want of memory only its newest request is given up; the others are computed again.
        """
        logger.error("a step failed", exc_info=error)
        for _, step in list(self._in_flight)[1:]:
            try:
                await self._wait(step)
            except Exception as another:  # they ran behind a failed step; their outcome does not matter
                logger.error("a step behind it failed too: %s", another)
        batches = [batch for batch, _ in self._in_flight]
        self._in_flight.clear()
        if isinstance(error, OutOfMemory):
            lost, told = self.schedule.give_up_newest(batches), OutOfMemory(NO_MEMORY)
        else:
            lost, told = (
                self.schedule.fail(batches),
                StepFailed("The forward pass failed; the request is lost."),
            )
        for request_id in lost:
            self._fail(request_id, told)

    def _receive(self) -> None:
        for message in self.inbox.take():
            if isinstance(message, Admit):
                self._admit(message.sequences)
            elif isinstance(message, Abort):
                deltas = self.schedule.abort(message.request_id, message.finish)
                if deltas:
                    self._emit(deltas)
            else:
                self.schedule.finish_early(message.request_id, message.index)

    def _admit(self, sequences: list[Sequence]) -> None:
        try:
            self.schedule.add(*sequences)
        except PenstockError as error:
            self._fail(sequences[0].request.id, error)


class Progress:
    """What the logs and the watchdog want to know about the steps."""

    def __init__(self, log_interval_steps: int, page_size: int) -> None:
        self.num_steps = 0
        self.num_generated = 0
        self.gen_throughput = 0.0  # tokens per second over the last log interval
        self.last_step_s = time.monotonic()
        self._interval = log_interval_steps
        self._page_size = page_size
        self._mark_s = time.monotonic()
        self._mark_generated = 0
        self._num_decode_steps = 0

    def note_launch(self, schedule: Scheduler) -> None:
        """After every fill and launch."""
        fill = schedule.last_fill
        if fill.num_prompt_tokens and logger.isEnabledFor(logging.INFO):
            load = schedule.load
            logger.info(
                "Prefill batch. #new-seq: %d, #new-token: %d, #cached-token: %d, token usage: %.2f, "
                "#running-req: %d, #queue-req: %d, ",
                fill.num_new,
                fill.num_prompt_tokens,
                fill.num_cached_tokens,
                load.token_usage,
                load.num_running,
                load.num_waiting,
            )

    def note_applied(self, schedule: Scheduler, num_tokens: int) -> None:
        """After every applied step, which yielded about `num_tokens` tokens."""
        self.num_steps += 1
        self.num_generated += num_tokens
        self.last_step_s = time.monotonic()
        if schedule.last_fill.num_prompt_tokens:
            return
        self._num_decode_steps += 1
        if self._num_decode_steps % self._interval == 0:
            self._log_decode(schedule)

    def _log_decode(self, schedule: Scheduler) -> None:
        seconds = self.last_step_s - self._mark_s
        self.gen_throughput = (self.num_generated - self._mark_generated) / max(seconds, 1e-9)
        self._mark_s, self._mark_generated = self.last_step_s, self.num_generated
        load = schedule.load
        logger.info(
            "Decode batch. #running-req: %d, #token: %d, token usage: %.2f, "
            "gen throughput (token/s): %.2f, #queue-req: %d, ",
            load.num_running,
            load.num_used_pages * self._page_size,
            load.token_usage,
            self.gen_throughput,
            load.num_waiting,
        )
