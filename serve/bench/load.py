"""Sends a workload: each prompt at its time, no more at once than allowed, and collects the outcomes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from time import perf_counter
from typing import TypeVar

import anyio

from serve.bench.progress import Progress
from serve.bench.workload import Prompt

Result = TypeVar("Result")
Send = Callable[[Prompt, float], Awaitable[Result]]


async def drive(
    prompts: Sequence[Prompt],
    arrivals_s: Sequence[float],
    send: Send[Result],
    *,
    max_concurrency: int | None = None,
    progress: Progress | None = None,
) -> tuple[list[Result], float]:
    """What `send` returned in the order of the prompts, and the seconds from the start to the last one.

    `send(prompt, start_s)` must not raise for what a server does. With `max_concurrency` a prompt whose time
    has come waits for a free place; its clock starts when it is sent.
    """
    outcomes: list[Result | None] = [None] * len(prompts)
    places = anyio.Semaphore(max_concurrency) if max_concurrency else None
    start_s = perf_counter()

    async def one(number: int) -> None:
        async with AsyncExitStack() as stack:
            if places is not None:
                await stack.enter_async_context(places)
            outcomes[number] = await send(prompts[number], start_s)
        if progress is not None:
            progress.advance()

    async with anyio.create_task_group() as group:
        for number, arrival_s in enumerate(arrivals_s):
            if (early_s := arrival_s - (perf_counter() - start_s)) > 0:
                await anyio.sleep(early_s)
            group.start_soon(one, number)
    return [outcome for outcome in outcomes if outcome is not None], perf_counter() - start_s
