"""The scheduler actor: the step loop of one replica. The rules are in `runtime.scheduler`; this is the shell."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.to_thread

from runtime.actors.crash_record import write_record
from runtime.actors.detokenizer import DetokenizerActor
from runtime.actors.kv_events import KvEventPublisher
from runtime.actors.live_requests import LiveRequest, LiveRequests
from runtime.actors.mailbox import Mailbox
from runtime.actors.step_times import Progress
from runtime.actors.steps_in_flight import StepsInFlight
from runtime.batch import Batch, Runner
from runtime.config.plan import SchedulerPlan
from runtime.errors import (
    EngineFailure,
    NotFinite,
    OutOfMemory,
    Overloaded,
    PenstockError,
    StepFailed,
    WorkerFailed,
)
from runtime.request import Delta, Finish
from runtime.scheduler.apply import NOT_FINITE, RowFailed
from runtime.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from runtime.actors.replica import Replica
    from runtime.metrics.series import EngineMetrics, ReplicaSeries

logger = logging.getLogger("penstock.scheduler")

# Of the loop, from a request's bytes to this inbox: the handler's, the tokenizer's, and one to spare.
ARRIVAL_TURNS = 3
MAX_ARRIVAL_TURNS = 50  # however many keep coming
# Of a step's time, for the masks of grammars before the next step is filled, and the least that is worth a timer.
MASK_SHARE, MIN_WAIT_S = 0.5, 0.0002
QUEUE_PERIOD_S = 1.0
MAX_RETRY_AFTER_S = 60
CLOSE_TIMEOUT_S = 30.0

BROKEN = "The scheduler failed at this request; it was given up for the others."
STEP_FAILED = "The forward pass failed; the request is lost."
DISPLACED = "The request queue is full, and a request of higher priority took this one's place."
NO_MEMORY = "The device ran out of memory; this request came last and was given up for the others."


class Admit(NamedTuple):
    """A new request with its sequences."""

    live: LiveRequest


class Abort(NamedTuple):
    """End all choices of a request; each gets a last delta."""

    live: LiveRequest


class EndChoice(NamedTuple):
    """The text of a choice ended it; nothing more is to be sent for it."""

    live: LiveRequest
    index: int


class GiveBack(NamedTuple):
    """Hand a request to somebody else, unless it has begun meanwhile."""

    live: LiveRequest
    to: Callable[[LiveRequest], None]


class Wake(NamedTuple):
    """Host data came for a sequence that is in no step."""


WAKE = Wake()


class SchedulerActor:
    """Fill, launch, apply, for ever. Owns a replica's scheduler and its runner.

    With overlap, step n+1 is filled and launched before the tokens of step n are known. Each step's deltas go to the
    detokenizer.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        plan: SchedulerPlan,
        requests: LiveRequests,
        detokenizer: DetokenizerActor,
        *,
        index: int = 0,
        series: ReplicaSeries | None = None,
        kv_events: KvEventPublisher | None = None,
    ) -> None:
        self.index = index  # of the replica
        self.scheduler = scheduler
        self.runner = runner
        self.progress = Progress(scheduler, plan.log_interval_steps)
        self.steps = StepsInFlight(runner, self.progress, plan.watchdog_timeout_s)
        # Steps in flight while the next one is filled: for overlap one, in a pipeline one for each stage.
        self._depth = plan.micro_batches - 1 if plan.micro_batches > 1 else int(plan.overlap)
        self._watchdog_timeout_s = plan.watchdog_timeout_s
        self._max_queue_time_s = plan.max_queue_time_s
        self._crash_folder = plan.crash_folder
        self._priorities = plan.priorities
        self._receive_interval = plan.receive_interval
        self._requests = requests
        self._detokenizer = detokenizer
        self._inbox: Mailbox[Admit | Abort | EndChoice | GiveBack | Wake] = Mailbox()
        self._series = series
        self._kv_events = kv_events
        self._num_arriving = 0  # choices in the inbox
        self._tokens_arriving = 0  # of their prompts
        self._step_tokens = min(plan.step_prompt_tokens, plan.max_prefill_tokens)
        self._num_broken = 0  # times in a row that the scheduler failed, without a step applied between

    @classmethod
    def of(
        cls,
        replica: Replica,
        requests: LiveRequests,
        detokenizer: DetokenizerActor,
        *,
        index: int = 0,
        metrics: EngineMetrics | None = None,
    ) -> SchedulerActor:
        """The actor of the replica with this index."""
        series = None if metrics is None else metrics.replicas[index]
        plan = replica.plan.scheduler
        return cls(
            replica.scheduler,
            replica.runner,
            plan,
            requests,
            detokenizer,
            index=index,
            series=series,
            kv_events=replica.kv_events,
        )

    # --- messages ---

    def admit(self, live: LiveRequest) -> None:
        """Compute a request from now on."""
        live.scheduler = self
        live.times.queued = time.monotonic()
        self._num_arriving += len(live.sequences)
        self._tokens_arriving += sum(len(sequence.ids) for sequence in live.sequences)
        self._inbox.put(Admit(live))

    def abort(self, live: LiveRequest) -> None:
        """See SchedulerHandle."""
        self._inbox.put(Abort(live))

    def end_choice(self, live: LiveRequest, index: int) -> None:
        """See SchedulerHandle."""
        self._inbox.put(EndChoice(live, index))

    def give_back(self, live: LiveRequest, to: Callable[[LiveRequest], None]) -> None:
        """Have `to` take over a request, unless it has begun."""
        self._inbox.put(GiveBack(live, to))

    @property
    def room(self) -> int:
        """How many more choices the queue takes, those under way to it deducted."""
        return self.scheduler.room - self._num_arriving

    @property
    def least_urgency(self) -> float:
        """Of those that wait for their first step: a more urgent request is let in though there is no room."""
        return self.scheduler.least_urgency

    @property
    def wait_s(self) -> float:
        """How long a request that comes now is expected to wait until it runs."""
        return self.progress.queue.wait_s(self.scheduler.num_waiting + self._num_arriving)

    @property
    def retry_after_s(self) -> int:
        """The hint for those who are refused."""
        return min(max(1, math.ceil(self.wait_s)), MAX_RETRY_AFTER_S)

    @property
    def alive(self) -> list[SchedulerActor]:
        """As of a router: this one."""
        return [self]

    # --- life ---

    async def run(self) -> None:
        """Until cancelled. Raises `EngineFailure` when nothing can be computed any more, or a step hangs."""
        try:
            async with anyio.create_task_group() as parts:
                parts.start_soon(self._run_steps)
                parts.start_soon(self.runner.watch)
                parts.start_soon(self._watch_steps)
                parts.start_soon(self._watch_queue)
        except ExceptionGroup as group:
            failures = [error for error in group.exceptions if isinstance(error, EngineFailure)]
            if len(failures) < len(group.exceptions):  # a mistake of ours: the engine must not go on
                raise
            raise failures[0] from failures[0].__cause__

    async def close(self) -> None:
        """Close the runner. A device that hangs is left behind: its thread is a daemon."""
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await anyio.to_thread.run_sync(self.runner.close, abandon_on_cancel=True)
        if self._kv_events is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._kv_events.close)

    def flush(self) -> bool:
        """Empty the prefix tree; False, and nothing done, while requests run or wait."""
        flushed = self.scheduler.flush()
        self._publish_events()
        return flushed

    def _publish_events(self) -> None:
        if self._kv_events is not None and (events := self.scheduler.take_events()):
            self._kv_events.publish(events)

    async def _run_steps(self) -> None:
        while True:
            try:
                if not self.steps or self.progress.num_steps % self._receive_interval == 0:
                    self._receive()
                if self.steps:
                    await self._wait_for_masks()
                batch = self.scheduler.fill()
                self._publish_events()  # of what was applied before, too
            except Exception as error:  # the scheduler's boundary: memory, or a mistake of ours
                await self._rebuild(error)
                continue
            if batch is not None:
                self._launch(batch)
            if self.steps and (batch is None or len(self.steps) > self._depth):
                await self._finish_oldest()
            elif batch is None:
                self._wake_with_host_data()
                await self._inbox.wait()
                await self._gather()

    async def _wait_for_masks(self) -> None:
        """While a step runs: let the masks come that may say what is forced, up to a part of the step's time."""
        masks = self.scheduler.awaited_masks
        if masks is None:
            return
        left_s = (self.steps.predicted_s or 0.0) * MASK_SHARE - self.steps.age_s
        if left_s < MIN_WAIT_S:
            return
        loop = asyncio.get_running_loop()
        came = loop.create_future()
        masks.when_there(lambda: _call_soon(loop, _set, came))  # mostly they all come together
        timer = loop.call_later(left_s, _set, came)
        await came
        timer.cancel()

    def _wake_with_host_data(self) -> None:
        """Nothing can be computed: let the first host data that comes for a sequence end the wait."""
        loop = asyncio.get_running_loop()
        for data in self.scheduler.awaited:
            data.when_there(lambda: _call_soon(loop, self._inbox.put, WAKE))

    async def _gather(self) -> None:
        """Nothing is running: let those in who ask at the same moment, which takes microseconds.

        Otherwise the first would be computed alone, and all the others would wait for that step and, with overlap,
        for the next one. Who would not fit into it may as well come while it is computed, and be tokenized then.
        """
        num_before, num_quiet = 0, 0
        for _ in range(MAX_ARRIVAL_TURNS):
            if self._tokens_arriving >= self._step_tokens:
                return
            num_quiet = num_quiet + 1 if len(self._inbox) == num_before else 0
            if num_quiet == ARRIVAL_TURNS:
                return
            num_before = len(self._inbox)
            await asyncio.sleep(0)

    async def _watch_steps(self) -> None:
        """Raise `EngineFailure` when a step has not come back for too long: callers must not wait for ever."""
        await self.steps.wait_until_overdue()
        reason = f"No step came back for {self._watchdog_timeout_s:g} s (--watchdog-timeout)."
        state = {**self.scheduler.load._asdict(), "num_steps": self.progress.num_steps}
        write_record(self._crash_folder, reason, state, self.steps.batches, self._requests)
        raise EngineFailure("The engine hangs: a step did not come back.")

    async def _watch_queue(self) -> None:
        """End the requests that wait for longer than they may, with what to do about it."""
        limit_s = self._max_queue_time_s
        while limit_s is not None:
            await anyio.sleep(min(QUEUE_PERIOD_S, limit_s / 4))
            late = time.monotonic() - limit_s
            for live in self._requests:
                if (
                    live.scheduler is self
                    and live.times.arrived < late
                    and live.waits
                    and not live.request.follows
                ):
                    reason = f"The request waited for {limit_s:g} s without running (--max-queue-time)."
                    self._requests.fail(live.request.id, Overloaded(reason, retry_after_s=self.retry_after_s))

    # --- steps ---

    def _launch(self, batch: Batch) -> None:
        self.steps.add(batch, self.runner.launch(batch))
        if batch.stats.num_new:
            self._note_entered(batch)
        if self._series is not None:
            self._series.launched(batch)

    def _note_entered(self, batch: Batch) -> None:
        """Some of these sequences are in a step for the first time."""
        now_s = time.monotonic()
        for sequence in batch.sequences:
            live = self._requests.get(sequence.request.id)
            if live is None or live.times.scheduled:
                continue
            live.times.scheduled = now_s
            if self._series is not None:
                self._series.entered(now_s - live.times.queued, sequence.num_cached)

    async def _finish_oldest(self) -> None:
        try:
            output = await self.steps.output()
        except WorkerFailed:  # nothing can be computed any more: the owner decides
            raise
        except Exception as error:  # the step boundary: whatever the forward raised costs only its requests
            await self._recover(error)
            return
        batch = self.steps.pop()
        try:
            deltas = self.scheduler.apply(batch, output)
        except Exception as error:
            await self._rebuild(error, output.failed)
            return
        self._num_broken = 0
        if output.failed:
            deltas = self._fail_broken(deltas)
        if deltas:
            self._detokenizer.inbox.put(deltas)
        duration_s, num_tokens = self.progress.note_applied(batch, deltas)
        self.scheduler.note_step_time(self.progress.times.decode_s)
        if batch.stats.num_prompt_tokens:
            self.scheduler.limit_steps(*(self.progress.times.enough_tokens or (None, None)))
        if self._series is not None:
            self._series.applied(batch, duration_s, num_tokens)

    def _fail_broken(self, deltas: list[Delta]) -> list[Delta]:
        """End the requests whose logits were no numbers with an error; the deltas of the others."""
        broken = {
            delta.request_id
            for delta in deltas
            if delta.finish is not None and delta.finish.message == NOT_FINITE
        }
        for request_id in broken:
            logger.error("request %d met values that are not finite numbers", request_id)
            self._requests.fail(request_id, NotFinite(NOT_FINITE))
        return [delta for delta in deltas if delta.request_id not in broken]

    async def _recover(self, error: Exception) -> None:
        """A step failed: the pages are as new, and everybody is computed again.

        For want of memory its newest request is given up; else the one for which it fails, once that is known.
        """
        logger.error("a step failed", exc_info=error)
        batches = self.steps.batches
        self.steps.pop()
        await self.steps.let_finish()
        if isinstance(error, OutOfMemory):
            lost, reason = self.scheduler.give_up_newest(batches), OutOfMemory(NO_MEMORY)
        else:
            lost, reason = self.scheduler.fail(batches), StepFailed(STEP_FAILED)
        for request_id in lost:
            self._requests.fail(request_id, reason)

    async def _rebuild(self, error: Exception, failed: Collection[int] = ()) -> None:
        """The scheduler itself raised: make its tables anew, and have everybody computed again.

        Only the request at whose row it happened is given up. Where that is not known, nobody is the first time, and
        then, as long as it goes on, the newest: what came last is likeliest to be the reason, or the memory it takes.
        """
        logger.error("the scheduler failed; what runs is computed again", exc_info=error)
        await self.steps.let_finish()
        lost: set[int] = set()
        if isinstance(error, RowFailed):
            lost = {error.request_id}
            kept = [delta for delta in error.deltas if delta.request_id != error.request_id]
            if deltas := self._fail_broken(kept) if failed else kept:
                self._detokenizer.inbox.put(deltas)
        elif self._num_broken:
            lost = {max((sequence.request.id for sequence in self.scheduler), default=-1)}
        self._num_broken += 1
        self.scheduler.rebuild(lost)
        await asyncio.sleep(0)
        for request_id in lost:
            self._requests.fail(request_id, StepFailed(BROKEN))

    def _receive(self) -> None:
        """Take in every message; what breaks at one costs its request. Raises the first of these errors at the end."""
        broken: Exception | None = None
        self._tokens_arriving = 0
        for message in self._inbox.take():
            if isinstance(message, Wake):
                continue
            try:
                self._take_in(message)
            except Exception as error:
                reason = StepFailed(BROKEN)
                # Refused: nothing is broken.
                if isinstance(error, PenstockError) and isinstance(message, Admit):
                    reason = error
                else:
                    broken = broken or error
                self._requests.fail(message.live.request.id, reason)
        if broken is not None:
            raise broken

    def _take_in(self, message: Admit | Abort | EndChoice | GiveBack) -> None:
        live = message.live
        if isinstance(message, Admit):
            self._num_arriving -= len(live.sequences)
            if self._priorities and self.scheduler.room <= 0 and not live.request.follows:
                self._displace(live.sequences[0].urgency)
            self.scheduler.add(*live.sequences)
        elif isinstance(message, EndChoice):
            self.scheduler.end(live.sequences[message.index])
        elif isinstance(message, GiveBack):
            if live.scheduler is self and live.waits and live.aborting is None:
                self.scheduler.withdraw(live.sequences)
                live.sequences = [sequence.restarted() for sequence in live.sequences]
                message.to(live)
        elif live.aborting is not None:
            deltas = self.scheduler.abort(live.sequences, live.aborting)
            if deltas:
                self._detokenizer.inbox.put(deltas)

    def _displace(self, urgency: int) -> None:
        """The queue is full: turn the newest of the least urgent away, for one that is more urgent."""
        waiting = [live for live in self._requests if live.scheduler is self and live.waits]
        waiting = [live for live in waiting if live.sequences and live.sequences[0].urgency < urgency]
        while waiting and self.scheduler.room <= 0:
            last = min(waiting, key=lambda live: (live.sequences[0].urgency, -live.times.queued))
            waiting.remove(last)
            self.scheduler.abort(last.sequences, Finish("abort", message=DISPLACED))
            self._requests.fail(last.request.id, Overloaded(DISPLACED, retry_after_s=self.retry_after_s))


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: object) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(call, *args)
