"""A thousand requests, a third of them cancelled at random moments, leave no trace."""

from __future__ import annotations

import asyncio
import random
import threading

import psutil

import tiny_models
from serve import Engine

NUM_REQUESTS = 1000
CANCELLED = 0.3
AT_ONCE = 64


async def test_nothing_is_left_behind():
    process = psutil.Process()
    draw = random.Random(5)
    options = {
        "max_total_tokens": 1024,
        "page_size": 4,
        "chunked_prefill_size": 64,
        "max_running_requests": 32,
    }
    async with Engine(tiny_models.cached(), **options) as engine:
        await one(engine, draw, cancel=False)
        core, before = engine.core, (len(asyncio.all_tasks()), threading.active_count(), process.num_fds())
        places = asyncio.Semaphore(AT_ONCE)

        async def guarded() -> bool:
            async with places:
                return await one(engine, draw, cancel=draw.random() < CANCELLED)

        cancelled = sum(await asyncio.gather(*(guarded() for _ in range(NUM_REQUESTS))))
        assert cancelled > NUM_REQUESTS * CANCELLED / 3
        await settled(engine)
        core.check()
        assert engine.status().num_used_pages == 0
        assert engine.flush_cache()
        assert engine.status().num_cached_pages == 0
        core.check()
        assert (len(asyncio.all_tasks()), threading.active_count(), process.num_fds()) == before
        assert engine.status().num_retracted > 0


async def one(engine: Engine, draw: random.Random, *, cancel: bool) -> bool:
    """Run one request to its end or to a random moment before. Return whether it was cancelled."""
    length, new = draw.randrange(1, 80), draw.randrange(1, 40)
    prompt = [3 + (place % 50 if draw.random() < 0.9 else draw.randrange(90)) for place in range(length)]
    sampling = {"max_new_tokens": new, "temperature": draw.choice([0, 1]), "n": draw.choice([1, 1, 1, 3])}
    if not cancel:
        await engine.generate(input_ids=prompt, sampling_params=sampling)
        return False
    if draw.random() < 0.5:
        return await cancelled_stream(engine, prompt, sampling, leave_after=draw.randrange(6))
    task = asyncio.create_task(engine.generate(input_ids=prompt, sampling_params=sampling))
    for _ in range(draw.randrange(60)):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    return task.cancelled()


async def cancelled_stream(engine: Engine, prompt: list[int], sampling: dict, leave_after: int) -> bool:
    pieces = engine.stream(input_ids=prompt, sampling_params=sampling)
    left = False
    async for _ in pieces:
        if leave_after == 0:
            left = True
            break
        leave_after -= 1
    await pieces.aclose()
    return left


async def settled(engine: Engine) -> None:
    while engine.status().num_requests or engine.status().num_running:
        await asyncio.sleep(0)
