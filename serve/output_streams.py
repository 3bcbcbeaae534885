"""Several requests at once: whose they are, and their output streams read side by side."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from runtime.actors.output_stream import OutputStream
from runtime.errors import first_error
from runtime.request import NOBODY, Chunk, Request
from serve.access import CALLER, CLIENT, THIS_PROCESS
from serve.work_budget import check_logprobs

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


def of_client(core: EngineCore, requests: Sequence[Request]) -> list[Request]:
    """The requests as those of the client that this task answers.

    Raises `InvalidRequest` for more log-probabilities than a call may ask for, unless this process asks for itself.
    """
    client, caller = CLIENT.get(), CALLER.get()
    if client is not THIS_PROCESS:
        check_logprobs(requests, core.plan.model.context_length)
    if not client.name and caller is NOBODY:
        return list(requests)
    return [replace(request, owner=client.name, caller=caller) for request in requests]


def close_all(streams: Sequence[OutputStream]) -> None:
    """Abort what has not ended."""
    for stream in streams:
        stream.close()


async def read_all(streams: Sequence[OutputStream]) -> list[list[Chunk]]:
    """The whole output of every stream, in order: one chunk per choice.

    The first error is raised and the other requests are aborted. Cancelled, it aborts all of them.
    """
    outputs: list[list[Chunk]] = [[] for _ in streams]

    async def read(index: int) -> None:
        outputs[index] = await streams[index].whole()

    try:
        await run_each(read, len(streams))
    except ExceptionGroup as errors:
        raise first_error(errors) from None
    finally:
        close_all(streams)
    return outputs


async def run_each(function: Callable[[int], Coroutine[Any, Any, None]], count: int) -> None:
    """Run `function(0)` to `function(count - 1)` concurrently; a single one without a task of its own."""
    if count == 1:
        await function(0)
        return
    async with anyio.create_task_group() as group:
        for index in range(count):
            group.start_soon(function, index)
