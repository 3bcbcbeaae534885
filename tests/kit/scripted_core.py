"""A real core on a runner without a model, whose steps a test can hold, fail or let go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import fake_core
import fake_runner
from runtime.actors.core import Core
from runtime.batch import Batch, Tokens
from runtime.cache.prefix import PrefixCache
from runtime.schedule.schedule import Schedule

NUM_PAGES, PAGE_SIZE, NUM_SLOTS = 64, 4, 8


class ScriptedRunner:
    """Steps end by themselves while `open` is set; the next `failures` of them raise."""

    def __init__(self, vocab_size: int) -> None:
        self.fake = fake_runner.FakeRunner(NUM_PAGES, PAGE_SIZE, NUM_SLOTS, vocab_size)
        self.open = asyncio.Event()
        self.open.set()
        self.failures = 0
        self.num_launched = 0
        self.closed = False

    def launch(self, batch: Batch) -> ScriptedStep:
        self.num_launched += 1
        self.fake.launch(batch)
        return ScriptedStep(self)

    def close(self) -> None:
        self.closed = True


class ScriptedStep:
    def __init__(self, runner: ScriptedRunner) -> None:
        self._runner = runner

    async def tokens(self) -> Tokens:
        runner = self._runner
        await asyncio.sleep(0)
        await runner.open.wait()
        if runner.failures:
            runner.failures -= 1
            runner.fake.drop()
            raise ValueError("the device has a bad day: secret detail")
        if not runner.fake.num_in_flight:
            raise ValueError("a step before this one failed")
        return runner.fake.finish_oldest()[1]


@contextlib.asynccontextmanager
async def running(**schedule: Any) -> AsyncIterator[tuple[Core, ScriptedRunner]]:
    """A core that takes requests (ids only), and its runner; keywords replace fields of the schedule plan."""
    facts = fake_core.make_facts()
    plan = replace(
        fake_core.make_plan(),
        schedule=fake_runner.make_plan(**{"max_running": NUM_SLOTS, **schedule}),
        cache=replace(fake_core.make_plan().cache, page_size=PAGE_SIZE),
    )
    runner = ScriptedRunner(facts.vocab_size)
    pages = Schedule(
        plan.schedule,
        PrefixCache(NUM_PAGES, PAGE_SIZE),
        vocab_size=facts.vocab_size,
        context_length=plan.model.context_length,
    )
    core = Core(plan, facts, None, pages, runner)
    started = asyncio.Event()
    task = asyncio.create_task(core.run(started.set))
    await started.wait()
    try:
        yield core, runner
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert runner.closed
