"""The engine core: runs the actors in one task group, owns the live requests, and is the API for route handlers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import anyio

from runtime.actors.adapters import AdapterRegistry
from runtime.actors.corpora import ExternalCorpora
from runtime.actors.detokenizer import DetokenizerActor
from runtime.actors.generation_pause import GenerationPause
from runtime.actors.input_processor import InputProcessor, namespace_of
from runtime.actors.kernel_compilation import DEPENDENCE, NOT_COMPILED, KernelCompilation
from runtime.actors.live_requests import LiveRequests, RequestObserver, Timeline
from runtime.actors.loop_watch import gc_watched, watch_loop
from runtime.actors.output_stream import OutputStream
from runtime.actors.request_observers import RequestLog, RequestMetrics, TimeStatsLog
from runtime.actors.router import Router
from runtime.actors.scheduler import SchedulerActor
from runtime.actors.sessions import Sessions
from runtime.actors.status import State, Status, status_of
from runtime.actors.storage import NO_TIER, Attachment, Storage, refuse_unsafe
from runtime.actors.tokenizer import TokenizerActor
from runtime.actors.tracing import RequestTraces
from runtime.actors.weight_control import NO_WEIGHTS, WeightControl
from runtime.actors.weight_update import replace_weights
from runtime.batch import Runner
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import ObservePlan, Plan
from runtime.errors import ConfigurationError, EngineClosed, EngineFailure, InvalidRequest, Overloaded, PenstockError
from runtime.grammar.load import load_grammars
from runtime.media.preparation import MediaPreparer
from runtime.media.transcription import Transcriber
from runtime.metrics.series import EngineMetrics
from runtime.profile import ProfileOptions
from runtime.request import Request, with_grammar
from runtime.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from runtime.actors.replica import Replica

logger = logging.getLogger("penstock.core")
SUBMITTED_AT_ONCE = 128  # `submit_all` yields to the event loop after this many requests (about 2 ms)
P = ParamSpec("P")
T = TypeVar("T")


class EngineCore:
    """An engine: accepts requests and returns their output streams.

    One task awaits `run`. All other methods must be called on the same event loop. When `run` returns or raises, every
    output has ended and all runners are closed. Several replicas of the model share the requests.
    `start_replica(index)` restarts a failed replica. If it is None, the engine fails when a replica fails.
    """

    def __init__(
        self,
        plan: Plan,
        facts: ModelFacts,
        tokenizer: Tokenizer | None,
        replicas: Seq[Replica],
        start_replica: Callable[[int], Awaitable[Replica]] | None = None,
        traces: RequestTraces | None = None,
        media: MediaPreparer | None = None,
        transcriber: Transcriber | None = None,
    ) -> None:
        self.plan = plan
        self.facts = facts
        self.tokenizer = tokenizer
        self._state: State = "starting"
        self._traces = traces
        self.media = media  # None: prompts may not contain images, videos or audio
        self.transcriber = transcriber
        self.metrics = EngineMetrics(plan.observe, plan.parallel.dp_size) if plan.observe.metrics else None
        shares_pages = plan.cache.host_tier and plan.cache.host_layout != "layer_first"
        self.adapters = AdapterRegistry(plan.lora, lambda: self._scheduler.alive, shares_pages=shares_pages)
        observers = [*_observers(plan.observe, self.metrics, traces), *([self.adapters] if plan.lora.enabled else [])]
        self.corpora = ExternalCorpora(lambda: self._scheduler.alive, plan.draft.max_corpus_tokens)
        self.sessions = Sessions(facts.bos_id if tokenizer is None else tokenizer.bos_id)
        self._requests = requests = LiveRequests([*observers, self.sessions])
        self._weights_lock = anyio.Lock()
        self._processor = InputProcessor(plan, facts, tokenizer)
        self._detokenizer = DetokenizerActor(tokenizer, requests, stream_interval=plan.scheduler.stream_interval)
        self._scheduler: SchedulerActor | Router
        balance = plan.parallel.balance
        if len(replicas) == 1 and start_replica is None:
            self._scheduler = SchedulerActor.of(replicas[0], requests, self._detokenizer, metrics=self.metrics)
        elif start_replica is None:
            self._scheduler = Router(replicas, None, balance, requests, self._detokenizer, self.metrics)
        else:

            async def start_again(index: int) -> Replica:
                # Weight updates wait until the replica takes part in them, so that all replicas have the same weights.
                async with self._weights_lock:
                    replica = await start_replica(index)
                    try:
                        await self.adapters.restore(replica.runner)
                    except BaseException:
                        await replica.close()
                        raise
                replica.scheduler.use_corpora(self.corpora.index)
                return replica

            self._scheduler = Router(replicas, start_again, balance, requests, self._detokenizer, self.metrics)
        self._grammars = load_grammars(plan, facts, tokenizer, self._processor.eos_ids)
        self._tokenizer = TokenizerActor(
            tokenizer,
            self._processor,
            requests,
            self._scheduler,
            self._grammars,
            self.adapters,
            media,
            self.sessions,
            num_threads=plan.tokenizer.encoder_threads,
        )
        self._compilation = replicas[0].compilation if len(replicas) == 1 else None
        if self._compilation is not None:
            self._processor.dependence = self._processor.dependence or DEPENDENCE
        elif any(replica.lacks_kernels for replica in replicas):
            self._processor.dependence = self._processor.dependence or NOT_COMPILED
        self.pause = GenerationPause(lambda: self._scheduler.alive, requests, self._tokenizer.submit)
        self.weights = WeightControl(
            lambda: self._scheduler.alive,
            self._weights_lock,
            self.pause,
            plan.parallel,
            self.set_weight_version,
            self._refuse_measured,
        )

    # --- lifecycle ---

    async def run(self, started: Callable[[], None]) -> None:
        """Run the actors until cancelled. Calls `started` when the engine accepts requests.

        Raises `EngineFailure` if an actor fails. The cause is chained.
        """
        try:
            with gc_watched(self.plan.observe.collector_warning_s):
                async with anyio.create_task_group() as actors:
                    actors.start_soon(self._detokenizer.run)
                    actors.start_soon(self._scheduler.run)
                    actors.start_soon(self._tokenizer.run)
                    if self.metrics is not None:
                        actors.start_soon(watch_loop, self.metrics.loop_lag_s)
                    await self.adapters.start()
                    if self.plan.draft.corpus_path is not None and self.tokenizer is not None:
                        await self.corpora.start(self.plan.draft.corpus_path, self.tokenizer)
                    self._state = "ready"
                    if self._grammars is not None:
                        self._grammars.start()
                    if self._compilation is not None:
                        actors.start_soon(self._change_kernels, self._compilation)
                        self._compilation = None  # the worker can be freed when the compilation has ended
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
            # Each part is closed in its own task, so that a second cancellation of this task leaves nothing open.
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as closing:
                    for actor in self._scheduler.alive:
                        closing.start_soon(actor.close)
                    closing.start_soon(anyio.to_thread.run_sync, self.adapters.close)
                    if self._grammars is not None:
                        closing.start_soon(anyio.to_thread.run_sync, self._grammars.close)
                    if self.media is not None:
                        closing.start_soon(self.media.close)
                    if self._traces is not None:
                        closing.start_soon(anyio.to_thread.run_sync, self._traces.close)

    async def _change_kernels(self, compilation: KernelCompilation) -> None:
        """Compile the C++ kernels and use them. Then accept requests that insist on deterministic answers."""
        if await compilation.run(self._scheduler.alive[0].paused, self._weights_lock):
            self._processor.dependence = self.plan.model.dependence

    async def drain(self) -> None:
        """Accept no new requests, and return when all requests have ended. Cancelling the call does not undo this."""
        if self._state == "ready":
            self._state = "draining"
        if self.weights.released or self.weights.lacks_weights:
            self._requests.fail_all(EngineClosed("The engine shuts down while it sleeps."))
        await self.pause.end()
        await self._requests.wait_idle()

    # --- requests ---

    def submit(self, request: Request) -> OutputStream:
        """Accept a request and return its output stream.

        Raises `InvalidRequest`, `Overloaded` or `EngineClosed` immediately. The stream raises later errors.
        """
        return self._counted(self._submit, request)

    def check_queue_space(self) -> None:
        """Raise `Overloaded` if the queue is full. A handler can then refuse a request before it reads the body.

        With priorities, this method does nothing, because the decision depends on the request's priority.
        """
        if self._state != "ready" or self.plan.scheduler.priorities:
            return
        self._counted(self._tokenizer.check_queue_space)

    async def submit_all(self, requests: Seq[Request]) -> list[OutputStream]:
        """Accept the requests of one call. The whole call is accepted if there is space for its first request.

        Yields to the event loop every `SUBMITTED_AT_ONCE` requests. If a request is refused or the call is cancelled,
        the requests accepted so far are aborted.
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

    def _counted(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` and return its result. If it raises an error, count the error in the metrics."""
        try:
            return function(*args, **kwargs)
        except PenstockError as error:
            if self.metrics is not None:
                self.metrics.refused(error)
            raise

    def _submit(self, request: Request) -> OutputStream:
        if self._state != "ready":
            raise EngineClosed(f"The engine is {self._state}.")
        request = with_grammar(request)
        if request.lora is not None:
            request = replace(request, adapter=self.adapters.acquire(request.lora))
        self.sessions.check(request)
        self._processor.check(request)
        self._tokenizer.check_queue_space(request)
        if self.pause.num_held and self.pause.num_held >= self._scheduler.queue_space:
            raise Overloaded("The request queue is full.", retry_after_s=self._scheduler.retry_after_s)
        live = self._requests.add(request)
        if not self.pause.holds_back(live):
            self._tokenizer.submit(live)
        return live.output

    def abort(self, request_id: int) -> None:
        """Abort a request in any phase. Its output ends with `Finish("abort")`. Unknown ids are ignored."""
        self._requests.abort(request_id)

    def abort_label(self, label: str, *, owner: str | None = None, exact: bool = False) -> int:
        """Abort every request whose label starts with `label`. Return the number of aborted requests.

        With `owner`, only this owner's requests are aborted. With `exact`, the label must be equal: only the request
        with this label is aborted, or all requests of the batch to which the client has given this name.
        """
        return self._requests.abort_label(label, owner=owner, exact=exact)

    def abort_all(self) -> int:
        return self._requests.abort_label("")

    # --- administration and inspection ---

    def flush_cache(self) -> bool:
        """Empty the prefix trees. Return False, without effect, while requests are in the engine."""
        if self.pause.mode == "retract":
            self.pause.retract()  # no request is in the engine, so freeing pages causes no recomputation
            return True
        if self._requests:
            return False
        # A list, not a generator: every replica is flushed, even if an earlier one returns False.
        flushed = [actor.flush() for actor in self._scheduler.alive]
        return all(flushed)

    def observe(self, observer: RequestObserver) -> Callable[[], None]:
        """Notify an observer of all requests that begin from now on. Return a function that removes the observer."""
        self._requests.observe(observer)
        return lambda: self._requests.stop_observing(observer)

    def hook_logits(self, function: Callable[[list[int], Any], Any]) -> Callable[[], None]:
        """Call `function` with the logits of all requests that begin from now on (see `LogitsHook`).

        Returns a function that removes the hook. Running requests then continue without it. Raises `InvalidRequest` if
        another function is active.
        """
        if self._processor.on_logits is not None:
            raise InvalidRequest("There is an on_logits of the engine already; end it first.", param="on_logits")
        active = True

        def call(ids: list[int], logits: Any) -> Any:
            return function(ids, logits) if active else None

        def end() -> None:
            nonlocal active
            active = False
            if self._processor.on_logits is call:
                self._processor.on_logits = None

        self._processor.on_logits = call
        return end

    @property
    def request_log_level(self) -> int | None:
        """Detail of the request log, or None if requests are not logged."""
        return next((each.level for each in self._requests.observers if isinstance(each, RequestLog)), None)

    @request_log_level.setter
    def request_log_level(self, level: int | None) -> None:
        for log in [each for each in self._requests.observers if isinstance(each, RequestLog)]:
            self._requests.stop_observing(log)
        if level is not None:
            self._requests.observe(RequestLog(level))

    def touch_prefix(self, request: Request) -> None:
        """Mark the cached prefix of a request's ids as most recently used. The prefix can still be evicted later."""
        if request.lora is not None:
            known = (adapter for adapter in self.adapters.adapters if adapter.name == request.lora)
            request = replace(request, adapter=next(known, None))
            if request.adapter is None:
                return
        for actor in self._scheduler.alive:
            actor.scheduler.touch(list(request.ids or ()), namespace_of(request))

    async def reset_cache(self) -> None:
        """Empty the prefix trees between two steps. Running requests are recomputed and then continue."""
        for actor in self._scheduler.alive:
            async with actor.paused():
                actor.scheduler.recompute()

    async def update_weights(
        self,
        path: str,
        load_format: str | None = None,
        *,
        flush_cache: bool = True,
        abort_all: bool = False,
        version: str | None = None,
    ) -> int:
        """Replace the weights with a checkpoint in a local folder. Return the number of requests in the engine.

        Running requests continue with the new weights. With `flush_cache`, the prefix trees are emptied and the KV of
        running sequences is recomputed; otherwise the KV of the old weights stays in use. `abort_all` first ends all
        requests. `version` is the new label of the weights. Raises `InvalidRequest` or `CheckpointError` if the old
        weights are still in place, and `EngineFailure` if a replica has no valid weights. Cancellation does not
        interrupt the replacement.
        """
        if "\0" in path or "://" in path:
            raise InvalidRequest("model_path must be a folder of this machine.", param="model_path")
        self._refuse_measured()
        if abort_all:
            self.abort_all()
        with anyio.CancelScope(shield=True):
            async with self._weights_lock:
                actors = self._scheduler.alive
                if self._state not in ("ready", "draining") or not actors:
                    raise EngineClosed(f"The engine is {self._state}.")
                if "weights" in self.weights.released or self.weights.lacks_weights:
                    raise InvalidRequest(NO_WEIGHTS)
                num_requests = len(self._requests)
                await replace_weights(actors, path, load_format, recompute=flush_cache)
                model = replace(self.plan.model, path=path)
                if load_format is not None:
                    model = replace(model, load_format=load_format)
                self.plan = replace(self.plan, model=model)
                if version is not None:
                    self.set_weight_version(version)
                self.facts = replace(self.facts, path=path)
                if self.media is not None:
                    await self.media.reload(path, self.plan)
        return num_requests

    async def attach_storage(self, attachment: Attachment) -> None:
        """Attach a page store to every replica's host tier.

        Raises `InvalidRequest` or `ConfigurationError` if the store cannot be used.
        """
        refuse_unsafe(attachment, self.plan)
        for storage in self._storages():
            await storage.attach(attachment)

    async def detach_storage(self) -> None:
        """Detach the page store. Its pages are kept. Does nothing if no store is attached."""
        for storage in self._storages():
            await storage.detach()

    async def clear_storage(self) -> None:
        """Remove all pages of this model from the page store. Raises `InvalidRequest` if no store is attached."""
        for storage in self._storages():
            await storage.clear()

    @property
    def attachment(self) -> Attachment | None:
        """The page store that is attached to all replicas, or None."""
        storages = [actor.storage for actor in self._scheduler.alive]
        attachments = [None if storage is None else storage.attachment for storage in storages]
        return attachments[0] if attachments and None not in attachments else None

    def _storages(self) -> list[Storage]:
        storages = [actor.storage for actor in self._scheduler.alive]
        found = [storage for storage in storages if storage is not None]
        if len(found) < len(storages) or not storages:
            raise InvalidRequest(NO_TIER)
        return found

    def _refuse_measured(self) -> None:
        """Raise `InvalidRequest` if a loaded adapter (DoRA) was computed from the current weights."""
        if measured := self.adapters.measured:
            raise InvalidRequest(
                f"Adapters with DoRA depend on the weights; unload them first: {', '.join(measured)}.",
                param="model_path",
            )

    def set_weight_version(self, version: str) -> None:
        """Set the label of the weights. Responses contain this label."""
        self.plan = replace(self.plan, serve=replace(self.plan.serve, weight_version=version))

    @property
    def num_requests(self) -> int:
        """Number of requests that have not ended."""
        return len(self._requests)

    async def start_profile(self, options: ProfileOptions) -> None:
        """Profile the next steps of the first replica's rank 0. Raises `InvalidRequest` if a profile is running."""
        payload = {**asdict(options), "path": str(options.path)}
        await asyncio.shield(self._first_runner.call("start_profile", payload))

    async def stop_profile(self) -> Path:
        """End the profile and return the path of its trace. Raises `InvalidRequest` if no profile was started."""
        path, *_ = await asyncio.shield(self._first_runner.call("stop_profile", {}))
        if path is None:
            raise InvalidRequest("No profile was started.")
        return path

    async def start_expert_record(self) -> None:
        """Discard the experts recorded so far, and start to record the experts that each step chooses.

        Raises `InvalidRequest` if expert recording is off in the plan.
        """
        await self._call_recorders("start_expert_record")

    async def stop_expert_record(self) -> None:
        """Stop recording the experts that steps choose."""
        await self._call_recorders("stop_expert_record")

    async def dump_expert_record(self) -> list[dict[str, Any]]:
        """Write the recorded experts to files and discard them.

        Return the file's path and the sums of each rank that records. Raises `InvalidRequest` if no step was recorded.
        """
        answers = [answer for answer in await self._call_recorders("dump_expert_record") if answer is not None]
        if not answers:
            raise InvalidRequest("No step has been recorded; start a record first.")
        return answers

    async def _call_recorders(self, verb: str) -> list[Any]:
        """Run an expert-record command (see `runtime.worker.verbs`) on all ranks. Return all answers."""
        if self.plan.experts.record is None:
            raise InvalidRequest(
                "The use of experts is not recorded; start the server with --expert-distribution-recorder-mode."
            )
        answers = [await asyncio.shield(runner.call(verb, {})) for runner in self.runners]
        return [answer for of_replica in answers for answer in of_replica]

    @property
    def _first_runner(self) -> Runner:
        runners = self.runners
        if not runners:
            raise EngineClosed("No replica is alive.")
        return runners[0]

    @property
    def runners(self) -> list[Runner]:
        """Runners of the live replicas, for measurements."""
        return [actor.runner for actor in self._scheduler.alive]

    @property
    def schedulers(self) -> list[SchedulerActor]:
        """Scheduler actors of the live replicas."""
        return self._scheduler.alive

    def oldest_waiting_s(self, scheduler: SchedulerActor) -> float:
        """Return how long this scheduler's oldest request has waited for its first step, or 0.0 if none waits."""
        queued = [
            live.times.queued for live in self._requests if live.scheduler is scheduler and not live.times.scheduled
        ]
        return time.monotonic() - min(queued) if queued else 0.0

    def timelines(self) -> list[Timeline]:
        """Return the timelines of live and recently ended requests, the latest arrival first."""
        timelines = [*self._requests.recent, *map(Timeline.of, self._requests)]
        return sorted(timelines, key=lambda timeline: -timeline.times[0])

    def check(self) -> None:
        """Raise `ValueError` if a replica has a leaked or doubly used page, or inconsistent sequences."""
        for actor in self._scheduler.alive:
            actor.scheduler.check()

    def status(self) -> Status:
        return status_of(self._scheduler, self._state, len(self._requests), self.plan.cache.page_size)


def _observers(plan: ObservePlan, metrics: EngineMetrics | None, traces: RequestTraces | None) -> list[RequestObserver]:
    """Return the observers (log, metrics, traces) that the plan requests."""
    observers: list[RequestObserver] = [] if metrics is None else [RequestMetrics(metrics)]
    if traces is not None:
        observers.append(traces)
    if plan.request_log_level is not None:
        observers.append(RequestLog(plan.request_log_level))
    if plan.log_request_times:
        observers.append(TimeStatsLog())
    return observers


def _failure(group: BaseExceptionGroup) -> PenstockError:
    """Return the error to report to callers: the first `PenstockError` in the group, or else a general one.

    If an adapter of the plan does not fit the model, this is a `ConfigurationError`.
    """
    failures, _ = group.split((EngineFailure, ConfigurationError))
    while isinstance(failures, BaseExceptionGroup):
        failures = failures.exceptions[0]
    if isinstance(failures, ConfigurationError):
        return type(failures)(*failures.refusals)
    return EngineFailure("An actor of the engine died.") if failures is None else type(failures)(failures.message)
