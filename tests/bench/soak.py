"""`just soak`: requests that come and leave at random, and what they leave behind.

R1, R2, R3 and the false alarms of R6 in docs/reliability.md.

On the demo model, in this process. Exit status 1 where a promise is not kept.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

import psutil

from bench import PROGRAM
from serve.python.engine import Engine

LEAVING = 0.3
AT_ONCE = 64
WARM_UP = 0.2  # of the requests, before memory is looked at
MAX_SLOPE_MB = 1.0  # for each 10,000 requests
MIN_REQUESTS_FOR_SLOPE = 10_000
MAX_FREED_S = 0.05  # from an abort to the pages, beyond the longest step meanwhile
MAX_FREED_STEPS = 2
ABORTS, BESIDE = 100, 16  # those that are timed, and the requests that run beside them
POLL_S = 0.001
_NUMBERS = itertools.count()
OPTIONS = {"max_total_tokens": 4096, "page_size": 16, "max_running_requests": 32, "log_level": "error"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog=f"{PROGRAM} soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="how many (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(argv)
    return asyncio.run(soak(asked.requests, asked.seed))


async def soak(num_requests: int, seed: int) -> int:
    """Run it and print what was found; 1 where something was left or memory grew."""
    draw, process = random.Random(seed), psutil.Process()
    samples: list[tuple[int, float]] = []
    async with Engine(**OPTIONS) as engine:
        await asyncio.gather(*(one(engine, draw, leaves=False) for _ in range(AT_ONCE)))
        await settled(engine)
        before = (len(asyncio.all_tasks()), threading.active_count(), process.num_fds())
        places, done, began = asyncio.Semaphore(AT_ONCE), 0, time.monotonic()

        async def guarded() -> bool:
            nonlocal done
            async with places:
                left = await one(engine, draw, leaves=draw.random() < LEAVING)
            done += 1
            if done >= WARM_UP * num_requests and done % max(1, num_requests // 50) == 0:
                samples.append((done, memory_mb()))
            return left

        left = 0
        async with alarms_counted(engine) as alarms:
            for start in range(0, num_requests, 1000):
                wanted = min(1000, num_requests - start)
                left += sum(await asyncio.gather(*(guarded() for _ in range(wanted))))
            await settled(engine)
        seconds = time.monotonic() - began
        engine.core.check()
        status = engine.status()
        after = (len(asyncio.all_tasks()), threading.active_count(), process.num_fds())
        async with busy(engine, draw):
            freed = [await time_to_free(engine) for _ in range(ABORTS)]
        await settled(engine)
        kept = status.num_used_pages == 0 and engine.flush_cache() and engine.status().num_cached_pages == 0
    slope = _slope(samples) * 10_000
    p50, p99 = (quantile([each.seconds for each in freed], q) * 1e3 for q in (0.5, 0.99))
    beyond_s = quantile([each.seconds - each.longest_step_s for each in freed], 0.99)
    most_steps = max(each.steps for each in freed)
    print(f"{num_requests} requests in {seconds:.0f} s, {left} left early, {status.num_retracted} retractions")
    print(f"R1 tasks, threads, descriptors: {before} -> {after}; pages exact: {kept}")
    print(
        f"R2 abort to pages free, {BESIDE} requests beside: at most {most_steps} steps; p50 {p50:.1f} ms, "
        f"p99 {p99:.1f} ms, and {beyond_s * 1e3:+.1f} ms beyond the longest step meanwhile"
    )
    print(
        f"R3 anonymous memory and swap: {slope:+.2f} MB for each 10,000 requests ({samples[-1][1]:.0f} MB at the end)"
    )
    print(f"R6 false alarms: {len(alarms)}; steps {max(alarms, default=0):.1f} s old at most in them")
    grows = num_requests >= MIN_REQUESTS_FOR_SLOPE and slope > MAX_SLOPE_MB
    late = most_steps > MAX_FREED_STEPS or beyond_s > MAX_FREED_S
    return int(before != after or not kept or grows or late or bool(alarms))


async def one(engine: Engine, draw: random.Random, *, leaves: bool) -> bool:
    """One request to its end, or to a random moment before it."""
    prompt = [3 + draw.randrange(50) for _ in range(draw.randrange(1, 60))]
    sampling = {"max_new_tokens": draw.randrange(1, 24), "n": draw.choice([1, 1, 1, 2]), "ignore_eos": True}
    task = asyncio.create_task(engine.generate(input_ids=prompt, sampling_params=sampling))
    if leaves:
        await asyncio.sleep(draw.random() * 0.05)
        task.cancel()
    await asyncio.wait([task])
    return task.cancelled() or task.result() is None


class Freed(NamedTuple):
    """From an abort until the request holds no page."""

    steps: int  # that were applied meanwhile
    seconds: float
    longest_step_s: float  # of those


async def time_to_free(engine: Engine) -> Freed:
    """Abort a request in the middle of its output.

    Looks every millisecond: without a pause, this thread would take the lock and a core from the step it waits for.
    """
    [actor] = engine.core.schedulers
    label = f"to be aborted {next(_NUMBERS)}"
    sampling = {"max_new_tokens": 500, "ignore_eos": True}
    stream = engine.stream(input_ids=[5, 6, 7], sampling_params=sampling, rid=label)
    await anext(stream)
    began, num_before = time.perf_counter(), actor.progress.num_steps
    ends = [actor.progress.last_step_s]
    await stream.aclose()
    while any(sequence.request.label == label for sequence in actor.scheduler):
        await asyncio.sleep(POLL_S)
        if actor.progress.last_step_s != ends[-1]:
            ends.append(actor.progress.last_step_s)
    seconds = time.perf_counter() - began
    longest = max((after - before for before, after in itertools.pairwise(ends)), default=0.0)
    return Freed(actor.progress.num_steps - num_before, seconds, longest)


@asynccontextmanager
async def busy(engine: Engine, draw: random.Random) -> AsyncIterator[None]:
    """Keep requests running meanwhile."""

    async def again() -> None:
        while True:
            await one(engine, draw, leaves=False)

    tasks = [asyncio.create_task(again()) for _ in range(BESIDE)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


@asynccontextmanager
async def alarms_counted(engine: Engine) -> AsyncIterator[list[float]]:
    """The ages of steps for which `/health` would have answered 503 meanwhile."""
    found: list[float] = []

    async def watch() -> None:
        while True:
            await asyncio.sleep(0.05)
            status = engine.status()
            if status.hangs:
                found.append(status.step_age_s)

    task = asyncio.create_task(watch())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.wait([task])


async def settled(engine: Engine) -> None:
    while engine.status().num_requests or engine.status().num_running:
        await asyncio.sleep(0.001)
    gc.collect()


def memory_mb() -> float:
    """RssAnon and VmSwap of this process."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "VmSwap"))) / 1024


def quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[int(q * (len(values) - 1))]


def _slope(samples: Sequence[tuple[int, float]]) -> float:
    """MB for each request, by least squares."""
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0


if __name__ == "__main__":
    sys.exit(main())
