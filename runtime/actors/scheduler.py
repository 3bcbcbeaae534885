"""The scheduler actor: the step loop of one replica. `runtime.scheduler` decides which sequences run."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from runtime.actors.crash_record import write_record
from runtime.actors.detokenizer import DetokenizerActor
from runtime.actors.expert_balancer import ExpertBalancer
from runtime.actors.kv_events import KvEventPublisher
from runtime.actors.live_requests import LiveRequest, LiveRequests
from runtime.actors.mailbox import Mailbox
from runtime.actors.recovery import BROKEN, Recovery
from runtime.actors.scheduler_messages import WAKE, Abort, Admit, EndChoice, GiveBack, Pause, Wake
from runtime.actors.step_times import Progress
from runtime.actors.steps_in_flight import StepsInFlight
from runtime.actors.storage import Storage
from runtime.batch import Batch, Runner
from runtime.config.plan import SchedulerPlan
from runtime.errors import (
    DeadlinePassed,
    EngineClosed,
    EngineFailure,
    Overloaded,
    PenstockError,
    StepFailed,
    WorkerFailed,
    first_error,
)
from runtime.request import Finish
from runtime.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from runtime.actors.replica import Replica
    from runtime.metrics.series import EngineMetrics, ReplicaSeries

logger = logging.getLogger("penstock.scheduler")

# Number of event-loop turns to wait for requests that arrive together. From its bytes to the scheduler's inbox, a
# request needs two turns (handler, tokenizer). One turn is spare.
ARRIVAL_TURNS = 3
MAX_ARRIVAL_TURNS = 50  # maximum number of turns to wait while requests keep arriving
# Before a batch is built, the actor waits for grammar masks, for up to this share of the running step's time. If less
# than `MIN_WAIT_S` seconds are left, it does not wait, because a timer would cost more.
MASK_SHARE, MIN_WAIT_S = 0.5, 0.0002
QUEUE_PERIOD_S = 1.0
MAX_RETRY_AFTER_S = 60
CLOSE_TIMEOUT_S = 30.0

ENDED = "The engine can compute no more."
DISPLACED = "The request queue is full, and a request of higher priority took this one's place."


class SchedulerActor:
    """Owns a replica's scheduler and runner. Builds steps, launches them and applies their results.

    With overlap scheduling, step n+1 is built and launched before the tokens of step n are known. The deltas of each
    step go to the detokenizer.
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
        storage: Storage | None = None,
        balancer: ExpertBalancer | None = None,
    ) -> None:
        self.index = index  # replica index
        self.storage = storage
        self.balancer = balancer
        if storage is not None:
            storage.wake = lambda: self._inbox.put(WAKE)
        self.scheduler = scheduler
        self.runner = runner
        self.progress = Progress(scheduler, plan.log_interval_steps)
        self.steps = StepsInFlight(runner, self.progress, plan.watchdog_timeout_s)
        # Maximum number of steps in flight while the next batch is built. With pipeline parallelism, it is the number
        # of micro-batches - 1. Otherwise it is 1 with overlap scheduling, and 0 without.
        self._depth = plan.micro_batches - 1 if plan.micro_batches > 1 else int(plan.overlap)
        self._recovery = Recovery(scheduler, self.steps, requests, detokenizer)
        self._watchdog_timeout_s = plan.watchdog_timeout_s
        self._max_queue_time_s = plan.max_queue_time_s
        self._crash_folder = plan.crash_folder
        self._target_s = None if plan.target_token_ms is None else plan.target_token_ms / 1000
        self._priorities = plan.priorities
        self._max_first_token_s = plan.max_first_token_s
        self._receive_interval = plan.receive_interval
        self._requests = requests
        self._detokenizer = detokenizer
        self._inbox: Mailbox[Admit | Abort | EndChoice | GiveBack | Wake] = Mailbox()
        self._series = series
        self._kv_events = kv_events
        self._num_arriving = 0  # choices of the `Admit` messages in the inbox
        self._tokens_arriving = 0  # prompt tokens of the requests whose `Admit` message is in the inbox
        self._step_tokens = min(plan.step_prompt_tokens, plan.max_prefill_tokens)
        self.delay_s = 0.0  # wait in seconds before each step, for tests of clients (`/slow_down`)
        self._pauses: list[Pause] = []
        self._failure: EngineFailure | None = None  # set if a pause left the replica unusable
        self._has_ended = False

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
        """Create the actor of a replica."""
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
            storage=replica.storage,
            balancer=replica.balancer,
        )

    # --- messages ---

    def admit(self, live: LiveRequest) -> None:
        """Add a request to the queue."""
        live.scheduler = self
        live.times.queued = time.monotonic()
        predicted_s = self._predicted_s(live)
        if predicted_s is not None:
            live.times.predicted_first_token_s = live.times.queued - live.times.arrived + predicted_s
            refusal = self._refusal(live, predicted_s)
            if refusal is not None:
                if self.storage is not None:
                    self.storage.note_arrival(live.sequences)
                self._requests.fail(live.request.id, refusal)
                return
        self._num_arriving += len(live.sequences)
        self._tokens_arriving += sum(len(sequence.ids) for sequence in live.sequences)
        self._inbox.put(Admit(live))

    def abort(self, live: LiveRequest) -> None:
        """End all choices of the request with the finish `live.aborting`."""
        self._inbox.put(Abort(live))

    def end_choice(self, live: LiveRequest, index: int) -> None:
        """End a choice whose text contains a stop string. No further delta follows."""
        self._inbox.put(EndChoice(live, index))

    def give_back(self, live: LiveRequest, to: Callable[[LiveRequest], None]) -> None:
        """Remove a request that has not run yet, and call `to` with it. Does nothing if the request has run."""
        self._inbox.put(GiveBack(live, to))

    @property
    def queue_space(self) -> int:
        """Number of further choices that the queue accepts, counting the requests in the inbox as queued."""
        return self.scheduler.queue_space - self._num_arriving

    @property
    def least_urgency(self) -> float:
        """Lowest urgency of the waiting requests. A full queue accepts only requests with a higher urgency."""
        return self.scheduler.least_urgency

    def first_token_s(self, num_tokens: int, urgency: float = -math.inf) -> float | None:
        """Predict the seconds until the first token of a new request with `num_tokens` uncached prompt tokens.

        Prompts in the engine with at least this urgency are computed first. Returns None if the prefill speed has not
        been measured yet.
        """
        token_s, decode_s = self.progress.times.mean_prompt_token_s, self.progress.times.decode_s or 0.0
        if token_s is None:
            return None
        num_before = self.scheduler.num_tokens_ahead(urgency) + self._tokens_arriving
        num_steps = len(self.steps) + -(-(num_before + num_tokens) // self._step_tokens)
        return max((num_before + num_tokens) * token_s + num_steps * decode_s, self.wait_s)

    def _predicted_s(self, live: LiveRequest) -> float | None:
        """Return the predicted seconds from now to the request's first token.

        Returns None if the request waits for another request, or if the prefill speed has not been measured yet.
        """
        if live.request.follows or not live.sequences or self.progress.times.mean_prompt_token_s is None:
            return None
        first = live.sequences[0]
        num_tokens = first.num_prompt - self.scheduler.num_cached(first)
        return self.first_token_s(num_tokens, first.urgency if self._priorities else -math.inf)

    def _refusal(self, live: LiveRequest, predicted_s: float) -> PenstockError | None:
        """Return the error if the first token would come too late, else None.

        `predicted_s` is its predicted time from now.
        """
        limit_s = self._max_first_token_s
        if limit_s is not None and predicted_s > limit_s:
            text = f"The first token is predicted in {predicted_s:.1f} s; this server accepts {limit_s:g} s."
            return Overloaded(text, retry_after_s=min(MAX_RETRY_AFTER_S, math.ceil(predicted_s - limit_s)))
        timeout_s = live.request.service.timeout_s
        if timeout_s is not None and time.monotonic() - live.times.arrived + predicted_s > timeout_s:
            text = f"The first token is predicted in {predicted_s:.1f} s, after the request's limit of {timeout_s:g} s."
            return DeadlinePassed(text, param="timeout_s")
        return None

    @property
    def wait_s(self) -> float:
        """Expected seconds until a new request runs."""
        return self.progress.queue.wait_s(self.scheduler.num_waiting + self._num_arriving)

    @property
    def retry_after_s(self) -> int:
        """Seconds after which a refused client should retry."""
        return min(max(1, math.ceil(self.wait_s)), MAX_RETRY_AFTER_S)

    @property
    def alive(self) -> list[SchedulerActor]:
        """A list with only this actor, so that callers can treat it like a `Router`."""
        return [self]

    # --- lifecycle ---

    async def run(self) -> None:
        """Run steps until cancelled. Raises `EngineFailure` if the runner fails or a step hangs."""
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._run_steps)
                tasks.start_soon(self.runner.watch)
                tasks.start_soon(self._watch_steps)
                tasks.start_soon(self._watch_queue)
                if self.storage is not None:
                    tasks.start_soon(self.storage.run)
                if self.balancer is not None:
                    tasks.start_soon(self.balancer.run)
        except ExceptionGroup as group:
            failures, others = group.split(EngineFailure)
            if failures is None or others is not None:  # a programming error: the engine must stop
                raise
            failure = first_error(failures)
            raise failure from failure.__cause__
        finally:
            self._has_ended = True
            for pause in self._pauses:
                if not pause.reached.done():
                    pause.reached.set_exception(EngineClosed(ENDED))

    async def close(self) -> None:
        """Close the runner. A device that hangs is abandoned after `CLOSE_TIMEOUT_S` with its daemon thread."""
        with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
            await anyio.to_thread.run_sync(self.runner.close, abandon_on_cancel=True)
        if self._kv_events is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self._kv_events.close)

    def flush(self) -> bool:
        """Empty the prefix tree. Return False, and do nothing, while requests run or wait."""
        flushed = self.scheduler.flush()
        self._publish_events()
        return flushed

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[Pause]:
        """Finish the steps in flight, and launch none inside the context. Requests are still admitted and aborted.

        Running sequences then continue. If the caller sets `Pause.recompute`, they are recomputed first; if it sets
        `Pause.failure`, the replica fails. Raises `EngineClosed` if the actor ends first.
        """
        if self._has_ended:
            raise EngineClosed(ENDED)
        pause = Pause(asyncio.get_running_loop().create_future())
        self._pauses.append(pause)
        self._inbox.put(WAKE)
        try:
            await pause.reached
            yield pause
        finally:
            self._pauses.remove(pause)
            self._failure = self._failure or pause.failure
            if pause.recompute:
                self.scheduler.recompute()
                self._publish_events()
            if (pause.recompute or pause.weights_changed) and self.storage is not None:
                self.storage.weights_changed(pause.checkpoint)
            self._inbox.put(WAKE)

    async def _stand_still(self) -> None:
        """Return when all pauses have ended. Raises `Pause.failure` if it is set."""
        while self._pauses:
            if self.steps:
                await self._finish_oldest()
                continue
            for pause in self._pauses:
                if not pause.reached.done():
                    pause.reached.set_result(None)
            await self._inbox.wait()
            try:
                self._receive()
            except Exception as error:  # handled as in `_run_steps`
                await self._recovery.after_exception(error)
        if self._failure is not None:
            raise self._failure

    def _publish_events(self) -> None:
        if self._kv_events is not None and (events := self.scheduler.take_events()):
            self._kv_events.publish(events)

    async def _run_steps(self) -> None:
        while True:
            if self._pauses or self._failure is not None:
                await self._stand_still()
            try:
                if not self.steps or self.progress.num_steps % self._receive_interval == 0:
                    self._receive()
                if self.steps:
                    await self._wait_for_masks()
                batch = self.scheduler.fill()
                self._publish_events()  # includes the events of the last applied step
            except Exception as error:  # too little host memory, or a programming error in the scheduler
                await self._recovery.after_exception(error)
                continue
            if batch is not None:
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                self._launch(batch)
            if self.storage is not None:
                self.storage.notify()
            if self.steps and (batch is None or len(self.steps) > self._depth):
                await self._finish_oldest()
            elif batch is None:
                self._wake_with_host_data()
                await self._inbox.wait()
                await self._gather()

    async def _wait_for_masks(self) -> None:
        """Wait for grammar masks that may force tokens, up to `MASK_SHARE` of the running step's time."""
        masks = self.scheduler.awaited_masks
        if masks is None:
            return
        left_s = (self.steps.predicted_s or 0.0) * MASK_SHARE - self.steps.age_s
        if left_s < MIN_WAIT_S:
            return
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()
        # Usually all masks arrive together, so waiting for one is enough.
        masks.when_there(lambda: _call_soon(loop, _set, arrived))
        timer = loop.call_later(left_s, _set, arrived)
        await arrived
        timer.cancel()

    def _wake_with_host_data(self) -> None:
        """Put `WAKE` into the inbox when a stalled sequence's host data arrives. Called when no sequence can run."""
        loop = asyncio.get_running_loop()
        for data in self.scheduler.awaited:
            data.when_there(lambda: _call_soon(loop, self._inbox.put, WAKE))

    async def _gather(self) -> None:
        """Wait some microseconds for requests that arrive together. Called when no step is running.

        Without this wait, the first request would run alone, and the requests that arrive just after it would wait for
        its step and, with overlap scheduling, for the step after it. The wait ends early when the waiting prompts fill
        a step.
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
        """Raise `EngineFailure` when a step exceeds the watchdog timeout, so that clients do not wait forever."""
        await self.steps.wait_until_overdue()
        reason = f"No step finished within {self._watchdog_timeout_s:g} s (--watchdog-timeout)."
        state = {**self.scheduler.load._asdict(), "num_steps": self.progress.num_steps}
        write_record(self._crash_folder, reason, state, self.steps.batches, self._requests)
        raise EngineFailure("The engine hangs: a step did not finish in time.")

    async def _watch_queue(self) -> None:
        """Fail requests that have waited longer than `--max-queue-time`."""
        limit_s = self._max_queue_time_s
        while limit_s is not None:
            await anyio.sleep(min(QUEUE_PERIOD_S, limit_s / 4))
            late = time.monotonic() - limit_s
            for live in self._requests:
                if live.scheduler is self and live.times.arrived < late and live.waits and not live.request.follows:
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
        """Record the time for sequences that run in a step for the first time."""
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
        except WorkerFailed:  # the replica is lost; `run` raises the error
            raise
        except Exception as error:  # a failed forward pass ends only requests of its step
            await self._recovery.after_failed_step(error)
            return
        batch = self.steps.pop()
        try:
            deltas = self.scheduler.apply(batch, output)
        except Exception as error:
            await self._recovery.after_exception(error, output.failed)
            return
        self._recovery.note_applied()
        if output.failed:
            deltas = self._recovery.fail_broken(deltas)
        if deltas:
            self._detokenizer.inbox.put(deltas)
        duration_s, late_s, num_tokens = self.progress.note_applied(batch, deltas)
        self.scheduler.note_step_time(self.progress.times.decode_s)
        self.scheduler.note_step(batch, num_tokens, duration_s, late_s)
        if self._target_s is not None:
            self.scheduler.limit_mixed_steps(self.progress.times.tokens_within(self._target_s))
        if batch.stats.num_prompt_tokens:
            times = self.progress.times
            self.scheduler.limit_steps(*(times.prompt_limits or (None, None)), scored=times.scored_limits)
            self.scheduler.note_prompt_time(times.prompt_token_s)
        if self._series is not None:
            self._series.applied(batch, duration_s, num_tokens)

    def _receive(self) -> None:
        """Process all messages. If a message raises an exception, its request fails.

        Raise the first exception at the end.
        """
        broken: Exception | None = None
        self._tokens_arriving = 0
        for message in self._inbox.take():
            if isinstance(message, Wake):
                continue
            try:
                self._take_in(message)
            except Exception as error:
                reason = StepFailed(BROKEN)
                # A refusal, such as `Overloaded`, ends only its request. The scheduler's tables are intact, so nothing
                # is rebuilt.
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
            if self.storage is not None:
                self.storage.note_arrival(live.sequences)
            if self._priorities and self.scheduler.queue_space <= 0 and not live.request.follows:
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
        """Fail waiting requests of lower urgency until a request with this urgency fits into the queue.

        The least urgent requests fail first, and the newest of them.
        """
        waiting = [live for live in self._requests if live.scheduler is self and live.waits]
        waiting = [live for live in waiting if live.sequences and live.sequences[0].urgency < urgency]
        while waiting and self.scheduler.queue_space <= 0:
            last = min(waiting, key=lambda live: (live.sequences[0].urgency, -live.times.queued))
            waiting.remove(last)
            self.scheduler.abort(last.sequences, Finish("abort", message=DISPLACED))
            self._requests.fail(last.request.id, Overloaded(DISPLACED, retry_after_s=self.retry_after_s))


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: object) -> None:
    with suppress(RuntimeError):  # raised if the loop is closed
        loop.call_soon_threadsafe(call, *args)
