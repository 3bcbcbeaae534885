"""A real engine core on a runner without a model. A test can hold, fail or release its steps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import fake_core
import fake_runner
from runtime.actors.engine_core import EngineCore
from runtime.actors.replica import Replica
from runtime.batch import Batch, StepOutput
from runtime.config.plan import ObservePlan
from runtime.errors import EngineFailure
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.scheduler.scheduler import Scheduler

NUM_PAGES, PAGE_SIZE, NUM_SEQUENCES = 64, 4, 8


class ScriptedRunner:
    """Steps end by themselves while `open` is set. The next `failures` steps raise, and so do all steps with a
    `poison`.
    """

    def __init__(self, vocab_size: int) -> None:
        self.fake = fake_runner.FakeRunner(NUM_PAGES, PAGE_SIZE, NUM_SEQUENCES, vocab_size)
        self.open = asyncio.Event()
        self.open.set()
        self.failures = 0
        self.poison: set[str] = set()  # labels of requests whose steps fail
        self.failure: Exception = ValueError("the device has a bad day: secret detail")
        self.sizes: list[int] = []  # number of rows of each step
        self.calls: list[tuple[str, dict[str, Any]]] = []  # verbs and their payloads
        self.answers: dict[str, list[Any] | Exception] = {}
        self.kernels_description = ""
        self.closed = False
        self._steps: set[asyncio.Task[StepOutput]] = set()
        self.death: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

    def launch(self, batch: Batch) -> asyncio.Future[StepOutput]:
        self.sizes.append(len(batch.sequences))
        self.fake.launch(batch)
        step = asyncio.create_task(self._run_oldest())
        self._steps.add(step)
        step.add_done_callback(self._forget)
        return step

    async def _run_oldest(self) -> StepOutput:
        await asyncio.sleep(0)
        await self.open.wait()
        batch = self.fake.oldest
        poisoned = batch is not None and any(s.request.label in self.poison for s in batch.sequences)
        if self.failures or poisoned:
            self.failures = max(self.failures - 1, 0)
            self.fake.drop()
            raise self.failure
        if not self.fake.num_in_flight:
            raise ValueError("a step before this one failed")
        return self.fake.finish_oldest()[1]

    def _forget(self, step: asyncio.Task[StepOutput]) -> None:
        self._steps.discard(step)
        if not step.cancelled():
            step.exception()  # retrieves the exception, because its waiter may have ended

    def call(self, verb: str, payload: Mapping[str, Any]) -> asyncio.Future[list[Any]]:
        """Answer immediately with `answers` for this verb: a list with each rank's answer, or an exception to raise."""
        self.calls.append((verb, dict(payload)))
        future = asyncio.get_running_loop().create_future()
        found = self.answers.get(verb, [None])
        if isinstance(found, Exception):
            future.set_exception(found)
        else:
            future.set_result(found)
        return future

    def finish_oldest(self) -> None:
        """Do nothing: steps end by themselves."""

    @property
    def num_launched(self) -> int:
        return len(self.sizes)

    async def watch(self) -> None:
        raise await self.death

    def die(self, error: Exception) -> None:
        """Behave as if a worker's process had ended. Steps in flight never end."""
        self.open.clear()
        self.death.set_result(error)

    def close(self) -> None:  # called on a thread
        self.closed = True
        for step in list(self._steps):
            step.get_loop().call_soon_threadsafe(step.cancel)


@contextlib.asynccontextmanager
async def running(**schedule: Any) -> AsyncIterator[tuple[EngineCore, ScriptedRunner]]:
    """Run a core that accepts requests (ids only). Yields the core and its runner. Keywords replace fields of the
    scheduler plan.
    """
    async with running_several(1, **schedule) as (core, runners):
        yield core, runners[0]


@contextlib.asynccontextmanager
async def running_several(
    num_replicas: int,
    *,
    balance: str = "round_robin",
    restarts: int = 100,
    failure: Exception | None = None,
    observe: ObservePlan = ObservePlan(),  # noqa: B008
    **schedule: Any,
) -> AsyncIterator[tuple[EngineCore, list[ScriptedRunner]]]:
    """Like `running`, with several replicas that can be restarted. Yields all runners ever created.

    After `restarts` restarts, a further restart raises `failure`.
    """
    facts = fake_core.make_facts()
    given = fake_core.make_plan()
    plan = replace(
        given,
        scheduler=fake_runner.make_plan(**{"max_running": NUM_SEQUENCES, **schedule}),
        cache=replace(given.cache, page_size=PAGE_SIZE),
        parallel=replace(given.parallel, balance=balance, dp_size=num_replicas),
        observe=observe,
    )
    runners: list[ScriptedRunner] = []

    async def start(index: int = 0) -> Replica:
        if len(runners) >= num_replicas + restarts:
            raise failure or EngineFailure("No more of these.")
        scheduler = Scheduler(
            plan.scheduler,
            PrefixCache(NUM_PAGES, PAGE_SIZE),
            vocab_size=facts.vocab_size,
            context_length=plan.model.context_length,
        )
        runners.append(ScriptedRunner(facts.vocab_size))
        return Replica(plan, scheduler, runners[-1])

    replicas = [await start() for _ in range(num_replicas)]
    core = EngineCore(plan, facts, None, replicas, start if num_replicas > 1 else None)
    started = asyncio.Event()
    task = asyncio.create_task(core.run(started.set))
    await started.wait()
    try:
        yield core, runners
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert all(runner.closed for runner in runners)
