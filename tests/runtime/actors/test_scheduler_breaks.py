"""An exception anywhere in the scheduler costs at most one request. All other requests get their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

import fake_runner
import scripted_core
from runtime.errors import StepFailed
from runtime.kv_cache.pages import PagePool
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.kv_cache.radix_tree import RadixTree
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from runtime.scheduler import apply, scheduler
from runtime.scheduler.batch_builder import BatchBuilder
from runtime.scheduler.queue import WaitingQueue
from runtime.scheduler.request_tables import RequestTables, Running
from runtime.scheduler.sampling import SamplingTables

PLACES: list[tuple[Any, str]] = [
    (PagePool, "allocate"),
    (PagePool, "free"),
    (PrefixCache, "lock"),
    (PrefixCache, "insert"),
    (PrefixCache, "release"),
    (RadixTree, "insert"),
    (RadixTree, "unlock"),
    (RadixTree, "evict"),
    (RequestTables, "enter"),
    (RequestTables, "leave"),
    (RequestTables, "append_pages"),
    (Running, "extend"),
    (Running, "leave"),
    (SamplingTables, "enter"),
    (SamplingTables, "leave"),
    (SamplingTables, "gather"),
    (WaitingQueue, "add"),
    (WaitingQueue, "remove"),
    (WaitingQueue, "put_back"),
    (BatchBuilder, "build"),
    (apply, "_delta"),
    (scheduler, "final_delta"),
]
PROMPTS = [tuple(3 + (5 * place + i) % 90 for i in range(4 + 7 * place)) for place in range(7)]
NEW = 24


def expected() -> list[list[int]]:
    drive = fake_runner.Drive(vocab_size=512)
    found = []
    for prompt in PROMPTS:
        sequence = fake_runner.make_sequence(prompt, max_new_tokens=NEW, seed=1)
        drive.add(sequence)
        drive.run()
        found.append(drive.output(sequence))
    return found


class Fault:
    """Raises at the given calls of a function, before or after its work."""

    def __init__(self, at: range, *, after: bool) -> None:
        self.at, self.after, self.num_calls, self.num_raised = at, after, 0, 0

    def around(self, call: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            number, self.num_calls = self.num_calls, self.num_calls + 1
            if number in self.at:
                self.num_raised += 1
                if self.after:
                    call(*args, **kwargs)
                raise MemoryError
            return call(*args, **kwargs)

        return wrapped


def faults() -> Iterator[tuple[range, bool]]:
    for at in (0, 3, 11):
        for after in (False, True):
            yield range(at, at + 1), after


async def trouble(fault: Fault, whole: list[list[int]]) -> int:
    """Run requests, abort one of them, and return the number of requests that the fault ended."""
    lost = 0
    async with scripted_core.running() as (core, _):
        sampling = SamplingParams(max_new_tokens=NEW, seed=1)
        outputs = [core.submit(Request(ids=prompt, sampling=sampling)) for prompt in PROMPTS]
        aborted = core.submit(Request(ids=(7, 7), sampling=SamplingParams(max_new_tokens=400, seed=1)))
        await asyncio.sleep(0.002)
        core.abort(aborted.request_id)
        async with asyncio.timeout(5):
            for output, ids in zip(outputs, whole, strict=True):
                try:
                    [chunk] = await output.whole()
                    assert chunk.ids == ids
                except StepFailed:
                    lost += 1
            try:
                await aborted.whole()
            except StepFailed:
                lost += 1
            while core.status().num_requests or core.status().num_running:
                await asyncio.sleep(0)
        core.check()
        assert core.status().state == "ready"
        assert core.status().num_used_pages == 0
        fault.at = range(0)
        [chunk] = await core.submit(Request(ids=PROMPTS[2], sampling=sampling)).whole()
        assert chunk.ids == whole[2]
        assert core.flush_cache()
        core.check()
    return lost


@pytest.mark.parametrize(("owner", "name"), PLACES, ids=lambda value: getattr(value, "__name__", value))
async def test_any_call_may_fail(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, num_raised = expected(), 0
    for at, after in faults():
        with monkeypatch.context() as patch:
            fault = Fault(at, after=after)
            patch.setattr(owner, name, fault.around(getattr(owner, name)))
            lost = await trouble(fault, whole)
            assert lost <= fault.num_raised, (at, after)
            num_raised += fault.num_raised
    assert num_raised


async def test_what_goes_on_failing_costs_the_newest_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step with the newest request fails. All other requests are answered."""
    build = BatchBuilder.build

    def breaks(self: BatchBuilder, number: int) -> Any:
        if any(sequence.ids[:2] == [7, 7] for sequence in [*self._running, *self._waiting]):
            raise RuntimeError("a mistake of ours")
        return build(self, number)

    monkeypatch.setattr(BatchBuilder, "build", breaks)
    assert await trouble(Fault(range(0), after=False), expected()) == 1
