"""`just soak`: requests that come and leave at random, and what they leave behind (R1, R2, R3 of docs/reliability.md).

On the demo model, in this process. Exit status 1 where a promise is not kept.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Sequence

import psutil

from bench import PROGRAM
from serve.engine import Engine

LEAVING = 0.3
AT_ONCE = 64
WARM_UP = 0.2  # of the requests, before memory is looked at
MAX_SLOPE_MB = 1.0  # for each 10,000 requests
MIN_REQUESTS_FOR_SLOPE = 10_000
MAX_FREED_S = 0.05  # from an abort to the pages, beyond a step
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
        for start in range(0, num_requests, 1000):
            wanted = min(1000, num_requests - start)
            left += sum(await asyncio.gather(*(guarded() for _ in range(wanted))))
        await settled(engine)
        seconds = time.monotonic() - began
        engine.core.check()
        status = engine.status()
        after = (len(asyncio.all_tasks()), threading.active_count(), process.num_fds())
        freed = [await time_to_free(engine) for _ in range(50)]
        await settled(engine)
        kept = status.num_used_pages == 0 and engine.flush_cache() and engine.status().num_cached_pages == 0
    slope = _slope(samples) * 10_000
    p99 = sorted(freed)[int(0.99 * (len(freed) - 1))]
    print(
        f"{num_requests} requests in {seconds:.0f} s, {left} left early, {status.num_retracted} retractions"
    )
    print(f"R1 tasks, threads, descriptors: {before} -> {after}; pages exact: {kept}")
    print(
        f"R2 abort to pages free: p50 {sorted(freed)[25] * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, a step included"
    )
    print(
        f"R3 anonymous memory and swap: {slope:+.2f} MB for each 10,000 requests ({samples[-1][1]:.0f} MB at the end)"
    )
    grows = num_requests >= MIN_REQUESTS_FOR_SLOPE and slope > MAX_SLOPE_MB
    return int(before != after or not kept or grows or p99 > MAX_FREED_S + 0.1)


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


async def time_to_free(engine: Engine) -> float:
    """Seconds from an abort to the moment when the request holds no page."""
    stream = engine.stream(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 500, "ignore_eos": True})
    await anext(stream)
    began = time.perf_counter()
    await stream.aclose()
    while engine.status().num_used_pages:
        await asyncio.sleep(0)
    return time.perf_counter() - began


async def settled(engine: Engine) -> None:
    while engine.status().num_requests or engine.status().num_running:
        await asyncio.sleep(0.001)
    gc.collect()


def memory_mb() -> float:
    """RssAnon and VmSwap of this process."""
    with open("/proc/self/status", encoding="ascii") as lines:
        return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "VmSwap"))) / 1024


def _slope(samples: Sequence[tuple[int, float]]) -> float:
    """MB for each request, by least squares."""
    mean_x = sum(x for x, _ in samples) / len(samples)
    mean_y = sum(y for _, y in samples) / len(samples)
    spread = sum((x - mean_x) ** 2 for x, _ in samples)
    return sum((x - mean_x) * (y - mean_y) for x, y in samples) / spread if spread else 0.0


if __name__ == "__main__":
    sys.exit(main())
