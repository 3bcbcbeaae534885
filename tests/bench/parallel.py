"""What a second process costs: a step of two ranks against the same step in one process, in its parts.

message      the engine's loop encodes the batch and sends it; a worker decodes it
collective   sums and gathers over the ranks, each counted as its fastest call of all steps at its position
wait         the rest of the time in them: the other rank was not there yet, or the processor was elsewhere
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from statistics import median
from time import perf_counter
from typing import Any

import anyio

from bench import PROGRAM
from ops.machine import Machine
from runtime.actors.assemble import prepare
from runtime.actors.replica import Replica, start_replica
from runtime.batch import Batch
from runtime.config import Args
from runtime.distributed.group_runner import GroupRunner, decode_batch, encode_batch
from runtime.distributed.link import HEAD, decode
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from runtime.sequence import Sequence as Row
from serve.bench import report
from serve.bench.options import new_parser
from serve.demo import demo_path

WARM_UP_STEPS = 5
US = 1e6


@dataclass(slots=True)
class Meter:
    """Times the first rank's calls to other ranks, step by step."""

    steps: list[list[float]] = field(default_factory=list)  # seconds of each call, for each step
    _current: list[float] = field(default_factory=list)

    def attach(self, axis: Any) -> None:
        for name in ("all_reduce", "gather", "broadcast"):
            setattr(axis, name, self._timed(getattr(axis, name)))

    def _timed(self, call: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(x: Any) -> Any:
            began = perf_counter()
            result = call(x)
            self._current.append(perf_counter() - began)
            return result

        return timed

    def end_step(self) -> None:
        self.steps.append(self._current)
        self._current = []

    def parts(self) -> tuple[int, float, float]:
        """Return (calls per step, minimum seconds of a step's calls, median seconds in excess of the minimum)."""
        by_index: dict[int, list[float]] = defaultdict(list)
        for step in self.steps:
            for index, seconds in enumerate(step):
                by_index[index].append(seconds)
        fastest = sum(min(seconds) for seconds in by_index.values())
        return len(by_index), fastest, median(sum(step) for step in self.steps) - fastest


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Times of one decode step, in seconds."""

    step_s: float
    message_s: float = 0.0
    decode_s: float = 0.0
    num_calls: int = 0
    collective_s: float = 0.0
    wait_s: float = 0.0


async def measure(model: str | None, tp_size: int, rows: int, steps: int) -> Cost:
    """Decode `rows` sequences for `steps` steps, one step at a time."""
    options = {"model_path": model} if model else {}
    args = Args.of(**options, tp_size=tp_size, skip_tokenizer_init=True, random_seed=0)
    plan, facts = prepare(args, Machine.probe(), demo_path=demo_path())
    plan = replace(plan, scheduler=replace(plan.scheduler, max_running=rows, watchdog_timeout_s=0.0))
    replica = await start_replica(plan, facts, 0)
    watching = asyncio.create_task(replica.runner.watch())
    try:
        return await _decode(replica, facts.vocab_size, rows, steps)
    finally:
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        await anyio.to_thread.run_sync(replica.runner.close)


async def _decode(replica: Replica, vocab_size: int, rows: int, steps: int) -> Cost:
    meter = Meter()
    group = replica.runner if isinstance(replica.runner, GroupRunner) else None
    if group is not None:
        meter.attach(group.mesh.axis("tp"))
    for number in range(rows):
        replica.scheduler.add(_row(number, steps, vocab_size))
    times: list[float] = []
    sending: list[float] = []
    decoding: list[float] = []
    while len(times) < steps + WARM_UP_STEPS:
        batch = replica.scheduler.fill()
        if batch is None:
            raise RuntimeError("The schedule ended before the measurement.")
        began = perf_counter()
        step = replica.runner.launch(batch)
        replica.runner.finish_oldest()
        output = await asyncio.shield(step)
        times.append(perf_counter() - began)
        replica.scheduler.apply(batch, output)
        meter.end_step()
        if group is not None:
            sending.append(group.seconds_sending)
            decoding.append(_decoding(batch))
    num_calls, collective_s, wait_s = 0, 0.0, 0.0
    if group is not None:
        meter.steps = meter.steps[WARM_UP_STEPS:]
        num_calls, collective_s, wait_s = meter.parts()
    return Cost(
        step_s=median(times[WARM_UP_STEPS:]),
        message_s=median(sending[WARM_UP_STEPS:]) if sending else 0.0,
        decode_s=median(decoding[WARM_UP_STEPS:]) if decoding else 0.0,
        num_calls=num_calls,
        collective_s=collective_s,
        wait_s=wait_s,
    )


def _row(number: int, steps: int, vocab_size: int) -> Row:
    ids = tuple((number * 7 + position) % vocab_size for position in range(16))
    new = steps + 2 * WARM_UP_STEPS
    sampling = SamplingParams(max_new_tokens=new, temperature=0.0, ignore_eos=True)
    request = Request(ids=ids, sampling=sampling)
    return Row(request, 0, ids, max_tokens=len(ids) + new, stop_ids=frozenset(), seed=number)


def _decoding(batch: Batch) -> float:
    """Return the seconds in which a worker decodes a received batch."""
    content = encode_batch(batch)
    began = perf_counter()
    _, text_length = HEAD.unpack_from(content)
    decode_batch(decode(bytearray(content[HEAD.size :]), text_length))
    return perf_counter() - began


def main(words: Sequence[str]) -> int:
    """Measure, print, and return the exit status."""
    parser = new_parser("parallel", "What a step of several processes costs.", program=PROGRAM)
    parser.add_argument("--model", help="checkpoint; by default the demo model")
    parser.add_argument("--tp-size", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--rows", type=int, default=8, help="sequences that decode together (default 8)")
    parser.add_argument("--steps", type=int, default=200, help="measured steps (default 200)")
    options = parser.parse_args(list(words))
    one = asyncio.run(measure(options.model, 1, options.rows, options.steps))
    several = asyncio.run(measure(options.model, options.tp_size, options.rows, options.steps))
    calls = f"{several.num_calls} collectives"
    rows: list[report.Row] = [
        ("step in one process (us)", one.step_s * US),
        (f"step of {options.tp_size} ranks (us)", several.step_s * US),
        ("message: encode and send (us)", several.message_s * US),
        ("message: decode, on the worker (us)", several.decode_s * US),
        (f"{calls}, fastest seen (us)", several.collective_s * US),
        (f"wait in {calls} (us)", several.wait_s * US),
    ]
    report.say(report.table("tensor parallel step", rows, {}))
    return 0
