from __future__ import annotations

import asyncio

import pytest

from runtime.actors.mailbox import Mailbox


async def test_reader_takes_everything_that_arrived_in_order():
    mailbox: Mailbox[int] = Mailbox()
    for item in range(5):
        mailbox.put(item)
    assert await mailbox.take_all() == [0, 1, 2, 3, 4]
    assert mailbox.take() == []


async def test_waiting_reader_is_woken_once_for_many_items():
    mailbox: Mailbox[int] = Mailbox()
    reader = asyncio.create_task(mailbox.take_all())
    await asyncio.sleep(0)
    mailbox.put(1)
    mailbox.put(2)
    assert await reader == [1, 2]


async def test_cancelled_reader_leaves_the_items():
    mailbox: Mailbox[int] = Mailbox()
    reader = asyncio.create_task(mailbox.take_all())
    await asyncio.sleep(0)
    mailbox.put(1)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert mailbox.take() == [1]


async def test_second_reader_is_refused():
    mailbox: Mailbox[int] = Mailbox()
    reader = asyncio.create_task(mailbox.take_all())
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match="single reader"):
        await mailbox.wait()
    mailbox.put(0)
    await reader
