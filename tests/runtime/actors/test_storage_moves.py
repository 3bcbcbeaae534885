"""Moves between the host tier and a store."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from runtime.actors.storage import Storage
from runtime.errors import InvalidRequest


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
        begin_load=lambda wanted, num_found: True,
        end_load=lambda wanted, count, seconds: None,
        release=lambda wanted: None,
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


async def test_pages_of_aborted_requests_are_not_awaited() -> None:
    """No server computes the rest of their prompts, and other requests wait to load pages."""
    sequence: Any = SimpleNamespace(request=SimpleNamespace(caller=SimpleNamespace(prefilled=True)))
    scheduled, polls = {id(sequence)}, []

    class Scheduler:
        def __contains__(self, each: object) -> bool:
            return id(each) in scheduled

    def exists(keys: list[bytes]) -> int:
        polls.append(keys)
        if len(polls) == 3:
            scheduled.clear()
        assert len(polls) < 9
        return 1

    plan = SimpleNamespace(cache=SimpleNamespace(prefetch_policy="wait_complete", storage="decode"))
    storage: Any = Storage(plan, "", "", SimpleNamespace(attached=True), Scheduler(), None)  # type: ignore[arg-type]
    wanted: Any = SimpleNamespace(keys=[b"a", b"b"], first=0, sequences=[sequence])
    assert await storage._found(SimpleNamespace(exists=exists), wanted) == 1
    assert len(polls) == 3
