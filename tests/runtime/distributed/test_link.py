"""Frames of any size arrive complete and in order, and both sides notice when the other side closes."""

from __future__ import annotations

import asyncio
import socket

import numpy as np
import pytest

from runtime.distributed.link import HEAD, MAX_FRAME_BYTES, Link, LinkClosed, WorkerLink, encode


def pair() -> tuple[Link, WorkerLink]:
    ours, theirs = socket.socketpair()
    return Link(ours), WorkerLink(theirs)


async def test_more_than_the_socket_holds_is_sent_later_and_in_order():
    link, worker = pair()
    for number in range(30):
        link.send(encode({"number": number}, {"much": np.full(100_000, number)}))
    for number in range(30):
        frame = await asyncio.to_thread(worker.receive)
        assert frame.body["number"] == number
        assert (frame.arrays["much"] == number).all()
    link.close()


async def test_worker_answers_and_ends():
    link, worker = pair()
    worker.send(encode({"one": 1}))
    worker.send(encode({"two": 2}))
    worker._socket.close()
    assert [(await link.receive()).body, (await link.receive()).body] == [{"one": 1}, {"two": 2}]
    with pytest.raises(LinkClosed):
        await link.receive()
    link.send(encode({}))  # does not raise; reading does
    link.close()


async def test_closed_engine_ends_the_worker():
    link, worker = pair()
    link.close()
    link.close()
    with pytest.raises(LinkClosed):
        worker.receive()


async def test_cancelled_reader_loses_no_frame():
    link, worker = pair()
    reading = asyncio.create_task(link.receive())
    await asyncio.sleep(0)
    worker.send(encode({"one": 1}))
    reading.cancel()
    await asyncio.wait([reading])
    assert (await link.receive()).body == {"one": 1}
    link.close()


@pytest.mark.parametrize(
    "garbage",
    [
        HEAD.pack(MAX_FRAME_BYTES + 1, 0),
        HEAD.pack(3, 3) + b"{,}",
        HEAD.pack(2, 2) + b"[]",
        HEAD.pack(9, 9) + b'{"":[[1]]}'[:9],
        HEAD.pack(15, 15) + b'{"":[["a",[9]]]}'[:15],
    ],
)
async def test_what_is_no_frame_closes_the_link_and_its_error_reaches_the_receiver(garbage: bytes):
    link, worker = pair()
    worker.send(encode({"one": 1}))
    reading = asyncio.create_task(link.receive())
    assert (await asyncio.wait_for(reading, 5)).body == {"one": 1}
    reading = asyncio.create_task(link.receive())
    await asyncio.sleep(0)
    worker.send(garbage)
    with pytest.raises(LinkClosed) as caught:
        await asyncio.wait_for(reading, 5)
    assert isinstance(caught.value.__cause__, ValueError | TypeError)
    with pytest.raises(LinkClosed):
        worker.receive()
    link.close()
