"""Requests that are submitted together: completed, refused half-way, or cancelled by their client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import fake_core
from runtime.actors.engine_core import SUBMITTED_AT_ONCE
from runtime.actors.output_stream import close_all, read_all
from runtime.errors import Overloaded
from runtime.request import Request
from serve.http.endpoint import ClientGoneError, read_all_or_disconnect
from served_core import Served


def requests(count: int) -> list[Request]:
    return [Request(ids=(1, 2)) for _ in range(count)]


async def test_outputs_come_in_the_order_of_the_requests():
    core = fake_core.FakeCore(None, ids_of=lambda request, index: [len(request.ids or ())] * 3)
    given = [Request(ids=(1,) * length) for length in (3, 1, 2)]
    outputs = await read_all(await core.submit_all(given))
    assert [chunk.ids[0] for [chunk] in outputs] == [3, 1, 2]


async def test_others_of_the_loop_run_between_the_prompts_of_a_call():
    core = fake_core.FakeCore(None, held=True)
    seen = [0]

    async def look() -> None:
        while True:
            seen.append(core.num_open)
            await asyncio.sleep(0)

    looking = asyncio.create_task(look())
    streams = await core.submit_all(requests(3 * SUBMITTED_AT_ONCE))
    looking.cancel()
    close_all(streams)
    new = [after - before for before, after in zip(seen, [*seen[1:], len(streams)], strict=True)]
    assert max(new) == SUBMITTED_AT_ONCE


async def test_refused_request_aborts_those_before_it():
    core = fake_core.FakeCore(None, held=True)
    submit, count = core.submit, 0

    def submit_two(request: Request) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            raise Overloaded("Too much is waiting.")
        return submit(request)

    core.submit = submit_two
    with pytest.raises(Overloaded):
        await core.submit_all(requests(3))
    assert core.num_open == 0


async def test_client_that_disconnects_aborts_everything():
    core = fake_core.FakeCore(None, held=True)

    async def disconnected() -> Any:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientGoneError):
        await read_all_or_disconnect(await core.submit_all(requests(2)), disconnected)
    assert core.num_open == 0


async def test_failing_receive_is_raised_and_aborts_everything():
    core = fake_core.FakeCore(None, held=True)

    async def broken() -> Any:
        raise OSError("the connection broke")

    with pytest.raises(OSError, match="the connection broke"):
        await read_all_or_disconnect(await core.submit_all(requests(2)), broken)
    assert core.num_open == 0


async def test_answers_have_a_request_id(served: Served) -> None:
    body = {"text": "a", "stream": True}
    for given, expected in (("mine-1", "mine-1"), ("a b", None), (None, None)):
        headers = {} if given is None else {"x-request-id": given}
        answer = await served.http.post("/generate", json=body, headers=headers)
        found = answer.headers["x-request-id"]
        assert found == expected if expected else len(found) == 32
    assert (await served.http.post("/generate", json={"text": 1})).headers["x-request-id"]
