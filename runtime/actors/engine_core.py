"""The engine core: the actors in one task group, the table of live requests, and what a handler may ask of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, ParamSpec, TypeVar

import anyio

from runtime.actors.detokenizer import DetokenizerActor
from runtime.actors.input_processor import InputProcessor
from runtime.actors.live_requests import LiveRequests, RequestObserver, Timeline
from runtime.actors.loop_watch import collector_watched, watch_loop
from runtime.actors.output_stream import OutputStream
from runtime.actors.request_observers import RequestLog, RequestMetrics, TimeStatsLog
from runtime.actors.router import Router
from runtime.actors.scheduler import SchedulerActor
from runtime.actors.tokenizer import TokenizerActor
from runtime.actors.tracing import RequestTraces
from runtime.batch import Runner
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ObservePlan, Plan
from runtime.errors import EngineClosed, EngineFailure, InvalidRequest, PenstockError
from runtime.grammar.load import load_grammars
from runtime.metrics.series import EngineMetrics
from runtime.profile import ProfileOptions
from runtime.request import Request, with_grammar
from runtime.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runtime.actors.replica import Replica

logger = logging.getLogger("penstock.core")
SUBMITTED_AT_ONCE = 128  # requests, in about 2 ms
P = ParamSpec("P")
T = TypeVar("T")

State = Literal["starting", "ready", "draining", "failed", "closed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The state of the engine and what it holds now, over all replicas that are alive."""

    state: State
    num_running: int
    num_waiting: int
    num_requests: int
    num_pages: int
    num_used_pages: int  # held by running sequences
    num_cached_pages: int  # kept for their prefix alone
    page_size: int
    num_used_tokens: int
    max_total_tokens: int
    num_retracted: int  # retractions since the start
    num_forced: int  # tokens that grammars forced and that took no step of their own, since the start
    num_steps: int
    num_generated: int
    gen_throughput: float
    kernels: str = ""  # what computes the model
    step_age_s: float = 0.0  # of the oldest step in flight
    predicted_step_s: float | None = None  # of that step, where it is known
    hangs: bool = False  # it has taken much longer than it should
    room: int = 0  # further sequences that the queue takes
    estimated_wait_s: float = 0.0  # until a request that comes now runs


class EngineCore:
    """One engine: submit requests, read output streams.

    `run` is the whole tree and belongs to one task; every other method is called on the same loop. When `run`
    ends, however it ends, every open output has ended too and the runners are closed. Several replicas, copies of
    the model, share the requests; `start_replica` starts the one with an index again when it has failed.
    """

    def __init__(
        self,
        plan: Plan,
        facts: ModelFacts,
        tokenizer: Tokenizer | None,
        replicas: Seq[Replica],
        start_replica: Callable[[int], Awaitable[Replica]] | None = None,
        traces: RequestTraces | None = None,
    ) -> None:
        self.plan = plan
        self.facts = facts
        self.tokenizer = tokenizer
        self._state: State = "starting"
        self._traces = traces
        self.metrics = EngineMetrics(plan.observe, plan.parallel.dp_size) if plan.observe.metrics else None
        self._requests = requests = LiveRequests(_observers(plan.observe, self.metrics, traces))
        self._processor = InputProcessor(plan, facts, tokenizer)
        self._detokenizer = DetokenizerActor(
            tokenizer, requests, stream_interval=plan.scheduler.stream_interval
        )
        self._scheduler: SchedulerActor | Router
        if start_replica is None:
            [replica] = replicas
            self._scheduler = SchedulerActor.of(replica, requests, self._detokenizer, metrics=self.metrics)
        else:
            balance = plan.parallel.balance
            self._scheduler = Router(
                replicas, start_replica, balance, requests, self._detokenizer, self.metrics
            )
        self._grammars = load_grammars(plan, facts, tokenizer, self._processor.eos_ids)
        self._tokenizer = TokenizerActor(
            tokenizer,
            self._processor,
            requests,
            self._scheduler,
            self._grammars,
            num_threads=plan.tokenizer.encoder_threads,
        )

    # --- life ---

    async def run(self, started: Callable[[], None]) -> None:
        """Run the actors until cancelled. Calls `started` once requests are taken.

        Raises `EngineFailure` when an actor died; its cause is chained.
        """
        try:
            with collector_watched(self.plan.observe.collector_warning_s):
                async with anyio.create_task_group() as actors:
                    actors.start_soon(self._detokenizer.run)
                    actors.start_soon(self._scheduler.run)
                    actors.start_soon(self._tokenizer.run)
                    if self.metrics is not None:
                        actors.start_soon(watch_loop, self.metrics.loop_lag_s)
                    self._state = "ready"
                    if self._grammars is not None:
                        self._grammars.start()
                    started()
        except BaseExceptionGroup as group:
            self._state = "failed"
            failure = _failure(group)
            self._requests.fail_all(failure)
            raise failure from group
        finally:
            if self._state != "failed":
                self._state = "closed"
            self._requests.fail_all(EngineClosed("The engine is shut down."))
            # In tasks of their own: a second cancellation of this one must not leave a runner open.
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as closing:
                    for actor in self._scheduler.alive:
                        closing.start_soon(actor.close)
                    if self._grammars is not None:
                        closing.start_soon(anyio.to_thread.run_sync, self._grammars.close)
                    if self._traces is not None:
                        closing.start_soon(anyio.to_thread.run_sync, self._traces.close)

    async def drain(self) -> None:
        """Take no new requests and return when the last one has ended. Cancelled, it stays draining."""
        if self._state == "ready":
            self._state = "draining"
        await self._requests.wait_idle()

    # --- requests ---

    def submit(self, request: Request) -> OutputStream:
        """Take a request in.

        Raises `InvalidRequest`, `Overloaded` or `EngineClosed` at once; what is found later reaches the output.
        """
        return self._counted(self._submit, request)

    def check_room(self) -> None:
        """Raise `Overloaded` where any request would be refused, so that nobody reads it first.

        With priorities that depends on the request: then nobody is refused here.
        """
        if self._state != "ready" or self.plan.scheduler.priorities:
            return
        self._counted(self._tokenizer.check_room)

    async def submit_all(self, requests: Seq[Request]) -> list[OutputStream]:
        """Take the requests of one call in: where there is room for the first, all are taken. Others of the loop run
        in between.

        When one is refused, or the call is cancelled, those before it are aborted, and that is raised.
        """
        streams: list[OutputStream] = []
        try:
            for request in requests:
                if len(streams) % SUBMITTED_AT_ONCE == SUBMITTED_AT_ONCE - 1:
                    await asyncio.sleep(0)
                streams.append(self.submit(replace(request, follows=True) if streams else request))
        except BaseException:
            for stream in streams:
                stream.close()
            raise
        return streams

    def _counted(self, take: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `take` returns; what it refuses is counted."""
        try:
            return take(*args, **kwargs)
        except PenstockError as error:
            if self.metrics is not None:
                self.metrics.refused(error)
            raise

    def _submit(self, request: Request) -> OutputStream:
        if self._state != "ready":
            raise EngineClosed(f"The engine is {self._state}.")
        request = with_grammar(request)
        self._processor.check(request)
        self._tokenizer.check_room(request)
        live = self._requests.add(request)
        self._tokenizer.submit(live)
        return live.output

    def abort(self, request_id: int) -> None:
        """End a request wherever it is; its output ends with `Finish("abort")`. Unknown ids are ignored."""
        self._requests.abort(request_id)

    def abort_label(self, label: str, *, owner: str | None = None, exact: bool = False) -> int:
        """Abort every request whose label starts with `label`; returns how many.

        With `owner` only those of this owner; with `exact` only that label, or its numbered ones of a batch.
        """
        return self._requests.abort_label(label, owner=owner, exact=exact)

    def abort_all(self) -> int:
        return self._requests.abort_label("")

    # --- the rest ---

    def flush_cache(self) -> bool:
        """Empty the prefix trees. False, and nothing done, while requests are in the engine."""
        if self._requests:
            return False
        flushed = [actor.flush() for actor in self._scheduler.alive]  # all, not up to the first False
        return all(flushed)

    async def start_profile(self, options: ProfileOptions) -> None:
        """Profile the next steps of the first replica's rank 0. Raises `InvalidRequest` while that is being done."""
        await self._first_runner.start_profile(options)

    async def stop_profile(self) -> Path:
        """End the profile -> where its trace was written. Raises `InvalidRequest` where none was begun."""
        path = await self._first_runner.stop_profile()
        if path is None:
            raise InvalidRequest("No profile was started.")
        return path

    @property
    def _first_runner(self) -> Runner:
        runners = self.runners
        if not runners:
            raise EngineClosed("No replica is alive.")
        return runners[0]

    @property
    def runners(self) -> list[Runner]:
        """Of the replicas that are alive, for measurements."""
        return [actor.runner for actor in self._scheduler.alive]

    @property
    def schedulers(self) -> list[SchedulerActor]:
        """Of the replicas that are alive."""
        return self._scheduler.alive

    def oldest_waiting_s(self, scheduler: SchedulerActor) -> float:
        """How long the oldest request waits that this scheduler has had in no step; 0.0 if there is none."""
        queued = [
            live.times.queued
            for live in self._requests
            if live.scheduler is scheduler and not live.times.scheduled
        ]
        return time.monotonic() - min(queued) if queued else 0.0

    def timelines(self) -> list[Timeline]:
        """Of the requests that are in the engine, and of the last that have ended; the latest arrival first."""
        found = [*self._requests.recent, *map(Timeline.of, self._requests)]
        return sorted(found, key=lambda each: -each.times[0])

    def check(self) -> None:
        """Raise `ValueError` unless every page and sequence of every replica is accounted for, exactly."""
        for actor in self._scheduler.alive:
            actor.scheduler.check()

    def status(self) -> Status:
        alive = self._scheduler.alive
        loads = [actor.scheduler.load for actor in alive]
        page_size = self.plan.cache.page_size
        num_pages = sum(load.num_pages for load in loads)
        return Status(
            state=self._state,
            num_running=sum(load.num_running for load in loads),
            num_waiting=sum(load.num_waiting for load in loads),
            num_requests=len(self._requests),
            num_pages=num_pages,
            num_used_pages=sum(load.num_used_pages for load in loads),
            num_cached_pages=sum(load.num_evictable_pages for load in loads),
            page_size=page_size,
            num_used_tokens=sum(load.num_used_tokens for load in loads),
            max_total_tokens=num_pages * page_size,
            num_retracted=sum(load.num_retracted for load in loads),
            num_forced=sum(load.num_forced for load in loads),
            num_steps=sum(actor.progress.num_steps for actor in alive),
            num_generated=sum(actor.progress.num_generated for actor in alive),
            gen_throughput=sum(actor.progress.gen_throughput for actor in alive),
            kernels=alive[0].runner.kernels_description if alive else "",
            step_age_s=max((actor.steps.age_s for actor in alive), default=0.0),
            predicted_step_s=max(
                (s for actor in alive if (s := actor.steps.predicted_s) is not None), default=None
            ),
            hangs=any(actor.steps.hangs for actor in alive),
            room=max(0, self._scheduler.room),
            estimated_wait_s=self._scheduler.wait_s,
        )


def _observers(
    plan: ObservePlan, metrics: EngineMetrics | None, traces: RequestTraces | None
) -> list[RequestObserver]:
    """Who counts, logs and traces requests."""
    made: list[RequestObserver] = [] if metrics is None else [RequestMetrics(metrics)]
    if traces is not None:
        made.append(traces)
    if plan.request_log_level is not None:
        made.append(RequestLog(plan.request_log_level))
    if plan.log_request_times:
        made.append(TimeStatsLog())
    return made


def _failure(group: BaseExceptionGroup) -> EngineFailure:
    """What to tell callers: which process is gone, if one is, and else that something of ours broke."""
    while isinstance(group.exceptions[0], BaseExceptionGroup):
        group = group.exceptions[0]
    for error in group.exceptions:
        if isinstance(error, EngineFailure):
            return type(error)(error.message)
    return EngineFailure("An actor of the engine died.")
