"""From requests to replies: submit them together, wait for all of them, let go when the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import orjson
from starlette.responses import Response
from starlette.types import Receive

from runtime.actors.output_stream import OutputStream
from runtime.errors import first_error
from runtime.request import Chunk, Request
from serve.core import EngineCore
from serve.errors import ClientGoneError


def submit_all(core: EngineCore, requests: Sequence[Request]) -> list[OutputStream]:
    """All or none: when one is refused, those before it are aborted and the refusal is raised."""
    replies: list[OutputStream] = []
    try:
        for request in requests:
            replies.append(core.submit(request))
    except BaseException:
        close_all(replies)
        raise
    return replies


def close_all(replies: Sequence[OutputStream]) -> None:
    for reply in replies:
        reply.close()


async def until_gone(receive: Receive) -> None:
    """Return when the client has left (or the answer is complete)."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def wait_all(replies: Sequence[OutputStream], receive: Receive) -> list[list[Chunk]]:
    """The whole answer to every request, in order: one chunk per choice.

    The first error is raised and the other requests are aborted. Raises `ClientGoneError`, with everything
    aborted, when the client leaves first. Cancelled, it aborts too.
    """
    answers: list[list[Chunk]] = [[] for _ in replies]

    async def read(place: int) -> None:
        answers[place] = await replies[place].whole()

    try:
        async with tasks_of(each(read, len(replies)), until_gone(receive)) as (reading, gone):
            await asyncio.wait((reading, gone), return_when=asyncio.FIRST_COMPLETED)
        if reading.cancelled():
            raise ClientGoneError
        reading.result()
    except ExceptionGroup as errors:
        raise first_error(errors) from None
    finally:
        close_all(replies)
    return answers


@asynccontextmanager
async def tasks_of(*work: Coroutine[Any, Any, Any]) -> AsyncIterator[tuple[asyncio.Task[Any], ...]]:
    """Tasks that end with the block, which need not wait for any.

    For every request and stream: a task group of anyio's and its scopes cost as much as reading the request, and
    each task that they cancel leaves a cycle to the garbage collector, with all that the request held.
    """
    tasks = tuple(asyncio.create_task(one) for one in work)
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def each(read: Any, count: int) -> None:
    """Run `read(0)` to `read(count - 1)` side by side; a single one without another task."""
    if count == 1:
        await read(0)
        return
    async with anyio.create_task_group() as readers:
        for place in range(count):
            readers.start_soon(read, place)


def json_response(value: Any, status: int = 200) -> Response:
    return Response(
        orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS), status, media_type="application/json"
    )
