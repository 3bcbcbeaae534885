"""`just overload`: four times as many requests as the engine can answer (R9 of docs/reliability.md).

Measures the cost and the refusals of the queue, with the demo model in this process and without a network.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from itertools import cycle

from bench import PROGRAM
from bench.soak import memory_mb
from runtime.errors import Overloaded
from serve.python.engine import Engine

NEW = 32
NUM_PROMPTS = 20_000  # too many for the prefix cache to hold


def main(argv: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(prog=f"{PROGRAM} overload", description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="of overload (default %(default)s)")
    parser.add_argument("--running", type=int, default=32, help="sequences that run at once (default %(default)s)")
    parser.add_argument("--queue", type=int, default=None, help="that may wait (default twice as many)")
    parser.add_argument("--factor", type=float, default=4.0, help="of the capacity (default %(default)s)")
    asked = parser.parse_args(argv)
    return asyncio.run(overload(asked.seconds, asked.running, asked.queue or 2 * asked.running, asked.factor))


async def overload(seconds: float, running: int, queue: int, factor: float) -> int:
    """Measure the capacity in a closed loop, send more requests than that, then measure how fast the load falls."""
    options = {"max_running_requests": running, "max_queued_requests": queue, "max_total_tokens": 16384}
    async with Engine(None, **options, log_level="error") as engine:
        draw = random.Random(0)  # creating a request must cost the measured machine little
        prompts = cycle([[draw.randrange(5, 4000) for _ in range(32)] for _ in range(NUM_PROMPTS)])
        sampling = {"max_new_tokens": NEW, "ignore_eos": True}

        async def ask() -> None:
            await engine.generate(input_ids=next(prompts), sampling_params=sampling)

        async def closed(until_s: float) -> int:
            count = 0
            while time.monotonic() < until_s:
                await ask()
                count += 1
            return count

        async def capacity() -> float:
            began = time.monotonic()
            counts = await asyncio.gather(*(closed(began + seconds / 4) for _ in range(running)))
            return sum(counts) / (time.monotonic() - began)

        await asyncio.gather(*(ask() for _ in range(running)))
        peak = await capacity()
        memory = memory_mb()
        times: list[float] = []
        refusals: list[float] = []
        hints: list[int] = []

        async def timed() -> None:
            asked_s = time.perf_counter()
            try:
                await ask()
                times.append(time.perf_counter() - asked_s)
            except Overloaded as error:
                refusals.append(time.perf_counter() - asked_s)
                hints.append(error.retry_after_s)

        tasks: set[asyncio.Task[None]] = set()
        num_sent, began = 0, time.monotonic()
        while (passed := time.monotonic() - began) < seconds:
            while num_sent < passed * peak * factor:
                task = asyncio.create_task(timed())
                tasks.add(task)
                task.add_done_callback(tasks.discard)
                num_sent += 1
            await asyncio.sleep(0.002)
        answered = len(times) / seconds
        grown = memory_mb() - memory
        await asyncio.gather(*tasks)
        began = time.perf_counter()
        await ask()
        recovery = time.perf_counter() - began
        peaks = (peak, await capacity())
        peak = sum(peaks) / 2  # averaged, because the machine's speed varies
    refusals.sort()
    times.sort()
    p99 = refusals[int(0.99 * (len(refusals) - 1))] if refusals else 0.0
    print(
        f"capacity {peaks[0]:.1f} requests/s before, {peaks[1]:.1f} after; "
        f"sent {factor:g} times as many for {seconds:g} s: {num_sent}"
    )
    print(
        f"answered {answered:.1f} requests/s, {answered / peak:.0%} of the capacity; p50 {times[len(times) // 2]:.2f} s"
    )
    print(f"refused {len(refusals)}, p99 {p99 * 1e3:.1f} ms, Retry-After up to {max(hints, default=0)} s")
    print(f"memory {grown:+.1f} MB; the next request after it took {recovery * 1e3:.0f} ms")
    return int(answered < 0.9 * peak or p99 > 0.02 or recovery > 1.0)


if __name__ == "__main__":
    sys.exit(main())
