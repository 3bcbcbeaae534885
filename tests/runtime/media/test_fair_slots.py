"""Slots that clients take in turns."""

from __future__ import annotations

import asyncio

import pytest

from runtime.media.fair_slots import Asker, FairSlots


async def run_in_turns(askers: list[Asker]) -> list[Asker]:
    """Return the order in which waiting askers got the only slot."""
    slots, order = FairSlots(1), []

    async def work(asker: Asker) -> None:
        async with slots.slot(asker):
            order.append(asker)

    async with slots.slot(Asker("first")):
        tasks = [asyncio.ensure_future(work(asker)) for asker in askers]
        await asyncio.sleep(0)
        assert not order
    await asyncio.gather(*tasks)
    return order


async def test_clients_take_turns_then_their_requests() -> None:
    many = [Asker("a", 1)] * 3 + [Asker("a", 2)] * 2
    order = await run_in_turns([*many, Asker("b", 3), Asker("b", 4)])
    assert [f"{client}{request}" for client, request in order] == ["a1", "b3", "a2", "b4", "a1", "a2", "a1"]


async def test_cancelled_waiters_leave_no_slot_behind() -> None:
    slots = FairSlots(1)
    holder = slots.slot(Asker("a"))
    await holder.__aenter__()

    async def wait(asker: Asker) -> str:
        async with slots.slot(asker):
            return "got it"

    waiting, other = (asyncio.ensure_future(wait(Asker("b", number))) for number in range(2))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await holder.__aexit__(None, None, None)
    assert await other == "got it"
    # The slot arrives in the same turn of the loop as the cancellation.
    async with slots.slot(Asker("a")):
        late = asyncio.ensure_future(wait(Asker("b")))
        await asyncio.sleep(0)
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert await wait(Asker("c")) == "got it"
