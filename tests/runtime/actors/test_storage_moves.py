"""Moves between the host tier and a store."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Set
from types import SimpleNamespace
from typing import Any

import anyio.to_thread
import pytest

import runtime.actors.storage as storage_module
from runtime.actors.storage import Storage
from runtime.errors import InvalidRequest
from runtime.page_store.transfer_protocol import PromptState
from runtime.request import Caller, Request
from runtime.sequence import Sequence


async def test_a_failed_load_leaves_no_copy_unsettled() -> None:
    new: dict[bytes, Any] = {b"a": object()}
    settled: list[tuple[Any, bool]] = []
    copied = asyncio.get_running_loop().create_future()

    def call(verb: str, payload: Mapping[str, Any]) -> asyncio.Future[list[Any]]:
        if verb == "copy_pages":
            return copied
        failed = asyncio.get_running_loop().create_future()
        failed.set_exception(InvalidRequest("The store is gone."))
        return failed

    tier = SimpleNamespace(
        attached=True,
        begin_load=lambda wanted, num_found, num_awaited: True,
        end_load=lambda wanted, count, seconds: None,
        release=lambda wanted: None,
        note_missed=lambda num_missed: None,
        settle=lambda pages, *, succeeded: settled.append((pages, succeeded)),
        take_new=lambda: new,
    )
    scheduler = SimpleNamespace(has_copies=True, take_copies=list)
    plan = SimpleNamespace(cache=SimpleNamespace(prefetch_policy="best_effort", storage="file"))
    storage: Any = Storage(plan, "", "", tier, scheduler, SimpleNamespace(call=call))  # type: ignore[arg-type]
    storage._store = SimpleNamespace(exists=len)
    wanted: Any = SimpleNamespace(keys=[b"b"], first=0, pages=[3], sequences=[])
    await storage._load(wanted, asyncio.Semaphore())
    assert not settled
    copied.set_result([])
    await asyncio.sleep(0)
    assert settled == [(new, True)]


class Prefilling:
    """A decode server's watch of one prompt. `answers` has its progress after each wait; the last one is repeated."""

    def __init__(self, *answers: tuple[int, PromptState]) -> None:
        self.answers, self.num_waits, self.is_scheduled, self.is_closed = [*answers], 0, True, False

    def watch(self, prompt: bytes, keys: list[bytes]) -> Prefilling:
        return self

    @property
    def progress(self) -> tuple[int, PromptState]:
        return self.answers[0]

    async def wait(self) -> None:
        self.num_waits += 1
        assert self.num_waits < 99
        if len(self.answers) > 1:
            del self.answers[0]

    def close(self) -> None:
        self.is_closed = True

    def exists(self, keys: list[bytes]) -> int:
        raise AssertionError

    def __contains__(self, sequence: object) -> bool:
        return self.is_scheduled

    async def found(self) -> list[tuple[int, int]]:
        sequence = Sequence(
            Request(caller=Caller(prefilled=True)), 0, list(range(40)), max_tokens=1, stop_ids=frozenset(), seed=0
        )
        plan = SimpleNamespace(cache=SimpleNamespace(prefetch_policy="wait_complete", storage="decode", page_size=16))
        storage: Any = Storage(plan, "", "", SimpleNamespace(attached=True), self, None)  # type: ignore[arg-type]
        wanted: Any = SimpleNamespace(keys=[b"a", b"b"], first=0, sequences=[sequence])
        found = [each async for each in storage._arrivals(self, wanted)]
        assert self.is_closed
        return found


async def test_pages_of_aborted_requests_are_not_awaited() -> None:
    """No server computes the rest of their prompts, and other requests wait to load pages."""
    prefilling = Prefilling((0, PromptState.PENDING))
    wait = prefilling.wait

    async def third() -> None:
        await wait()
        prefilling.is_scheduled = prefilling.num_waits < 3

    prefilling.wait = third
    assert await prefilling.found() == [(0, 0)]
    assert prefilling.num_waits == 3


async def test_a_pending_prompt_is_awaited_and_an_ended_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "STALL_S", -1.0)  # a prompt that has not arrived is given up at once
    assert await Prefilling((0, PromptState.UNKNOWN), (2, PromptState.ENDED)).found() == [(0, 0)]
    monkeypatch.setattr(storage_module, "STALL_S", 600.0)
    prefilling = Prefilling(*[(0, PromptState.PENDING)] * 9, (1, PromptState.PENDING), (2, PromptState.ENDED))
    assert await prefilling.found() == [(1, 1), (1, 0)]
    assert prefilling.num_waits == 10
    prefilling = Prefilling((0, PromptState.UNKNOWN), (1, PromptState.PENDING), (1, PromptState.ENDED))
    assert await prefilling.found() == [(1, 1), (0, 0)], "it has failed, so no further page comes"


async def test_a_slow_store_takes_no_threads_from_other_work() -> None:
    answer = threading.Event()
    plan = SimpleNamespace(cache=SimpleNamespace(storage="file"))
    storage: Any = Storage(plan, "", "", SimpleNamespace(attached=True), None, None)  # type: ignore[arg-type]
    store: Any = SimpleNamespace(exists=lambda keys: answer.wait(60))
    wanted: Any = SimpleNamespace(keys=[b"a"], first=0, sequences=[])
    lookups = [asyncio.ensure_future(anext(storage._arrivals(store, wanted))) for _ in range(8)]
    for _ in range(10):
        await asyncio.sleep(0)
    others = anyio.to_thread.current_default_thread_limiter().borrowed_tokens
    answer.set()
    await asyncio.gather(*lookups)
    assert others == 0


async def test_saves_wait_for_steps_that_a_cpu_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One small save is performed while requests run, the next one after them, and then all pages at once."""
    monkeypatch.setattr(storage_module, "SAVE_SHARE", 1e-9)
    tier, scheduler, saved = _Saving(100), SimpleNamespace(num_running=1, has_copies=False), asyncio.Event()
    sizes: list[int] = []

    def call(verb: str, payload: Mapping[str, Any]) -> asyncio.Future[list[Any]]:
        assert verb == "save_pages"
        sizes.append(len(payload["pages"]))
        saved.set()
        done = asyncio.get_running_loop().create_future()
        done.set_result([{"failed": 0, "us": 1000}])
        return done

    plan = SimpleNamespace(cache=SimpleNamespace(storage="file"), model=SimpleNamespace(device="cpu"))
    storage: Any = Storage(plan, "", "", tier, scheduler, SimpleNamespace(call=call))  # type: ignore[arg-type]
    task = asyncio.ensure_future(storage._save())
    storage.notify()
    await saved.wait()
    for _ in range(20):
        storage.notify()
        await asyncio.sleep(0)
    assert sizes == [8]
    scheduler.num_running = 0
    storage.notify()
    while tier.num_ready:
        saved.clear()
        await saved.wait()
    assert sizes == [8, 64, 28]
    task.cancel()


async def test_a_prompt_ends_if_the_host_tier_drops_its_pages_before_they_are_saved() -> None:
    """The prefill server is idle then, so no step looks for prompts that have ended."""
    told: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()

    def call(verb: str, payload: Mapping[str, Any]) -> asyncio.Future[list[Any]]:
        told.put_nowait(payload)
        answered = asyncio.get_running_loop().create_future()
        answered.set_result([None])
        return answered

    class Scheduler:
        num_running, has_copies = 0, False

        def __contains__(self, sequence: object) -> bool:
            return False

    tier = _Saving(0)
    tier.is_leaving = True
    plan = SimpleNamespace(cache=SimpleNamespace(storage="prefill", page_size=16), model=SimpleNamespace(device="cpu"))
    storage: Any = Storage(plan, "", "", tier, Scheduler(), SimpleNamespace(call=call))  # type: ignore[arg-type]
    sequence = Sequence(Request(), 0, list(range(40)), max_tokens=1, stop_ids=frozenset(), seed=0)
    tasks = [asyncio.ensure_future(work) for work in (storage._save(), storage._tell_prompts(storage._prompts))]
    storage.note_arrival([sequence])
    begun = await told.get()
    assert len(begun["begun"]) == 1
    assert begun["ended"] == []
    storage._save_work.set()
    assert (await asyncio.wait_for(told.get(), 30)) == {"begun": [], "ended": begun["begun"], "stored": []}
    for task in tasks:
        task.cancel()


class _Saving:
    """The pages of a storage tier that wait to be saved."""

    attached, is_distrusting, is_awaited = True, False, False

    def __init__(self, num_ready: int) -> None:
        self.num_ready, self.is_leaving = num_ready, False

    def has_leaving(self, keys: Set[bytes]) -> bool:
        return self.is_leaving

    @property
    def has_work(self) -> bool:
        return self.num_ready > 0

    def take_distrusted(self) -> list[bytes]:
        return []

    def take_save(self, limit: int = 64) -> Any:
        count, self.is_leaving = min(limit, self.num_ready), False
        self.num_ready -= count
        return SimpleNamespace(entries={bytes([n]): SimpleNamespace(page=n) for n in range(count)}) if count else None

    def end_save(self, save: Any, num_failed: int) -> None:
        return
