"""Whatever breaks for one request, its sender learns it, nothing leaks, and the others' bytes are the same."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading

import psutil
import pytest

import fault_points
import tiny_models
from fault_points import FaultPoint
from serve import Engine

NEIGHBOURS = 3
OPTIONS = {"max_total_tokens": 2048, "page_size": 4, "chunked_prefill_size": 64, "max_running_requests": 8}


async def neighbour(engine: Engine, seed: int) -> list[int]:
    sampling = {"max_new_tokens": 40, "seed": seed, "temperature": 1, "ignore_eos": True}
    return (await engine.generate(f"A story about the number {seed}", sampling))["output_ids"]


async def settled(engine: Engine) -> None:
    async with asyncio.timeout(30):
        while engine.status().num_requests or engine.status().num_running:
            await asyncio.sleep(0.001)


async def trouble(
    engine: Engine, point: FaultPoint, alone: list[list[int]], before: tuple[int, int, int]
) -> str:
    """What went otherwise than it should; nothing if all is well."""
    others = [asyncio.create_task(neighbour(engine, seed)) for seed in range(NEIGHBOURS)]
    while engine.status().num_running < NEIGHBOURS and not all(task.done() for task in others):
        await asyncio.sleep(0)
    raised: Exception | None = None
    try:
        async with asyncio.timeout(30):
            await point.act(engine)
    except Exception as error:
        raised = error
    if (None if raised is None else type(raised)) is not point.error:
        return f"ended with {raised!r}, not with {point.error}"
    if [await task for task in others] != alone:
        return "other requests got other tokens"
    await settled(engine)
    engine.core.check()
    status = engine.status()
    if status.num_used_pages or status.num_waiting or status.state != "ready":
        return f"left {status}"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(5):
            while grown(before):
                await asyncio.sleep(0.01)
    if grown(before):
        return f"tasks, threads and descriptors were {before} and are {counts()}"
    if await neighbour(engine, 0) != alone[0]:
        return "a later request got other tokens"
    return ""


def grown(before: tuple[int, int, int]) -> bool:
    """Whether anything is left over; idle threads of a pool may have ended meanwhile."""
    return any(now > then for now, then in zip(counts(), before, strict=True))


def counts() -> tuple[int, int, int]:
    return len(asyncio.all_tasks()), threading.active_count(), psutil.Process().num_fds()


@pytest.mark.slow
async def test_every_fault_is_contained() -> None:
    logging.getLogger("penstock").setLevel(logging.CRITICAL)
    points = fault_points.fault_points()
    assert len(points) >= 40
    assert len({point.name for point in points}) == len(points)
    async with Engine(tiny_models.cached(), **OPTIONS) as engine:
        alone = [await neighbour(engine, seed) for seed in range(NEIGHBOURS)]
        await fault_points.ask(engine)
        before = counts()
        # The threads that encode long texts are made on demand and kept.
        await engine.generate("lorem " * 400, {"max_new_tokens": 1})
        await settled(engine)
        before = counts()
        found = {point.name: await trouble(engine, point, alone, before) for point in points}
        wrong = {name: said for name, said in found.items() if said}
        assert not wrong, f"{len(wrong)} of {len(points)} faults are not contained: {wrong}"
        assert engine.flush_cache()
        engine.core.check()
        assert engine.status().num_cached_pages == 0
