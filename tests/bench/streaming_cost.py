"""What a streamed token costs the loop: real actors, real application, real sockets, scripted tokens.

The server runs in this process, the client in another. A step yields its tokens after a fixed time, long
enough for the loop to be idle in between: so every token is an event of its own, as it would be behind a
model that is slower than the loop, and nothing is merged that would make the figure look better.

What metrics add is found within one server: they count every other step, and the processor time of the loop's thread
is noted step by step, so that neighbours differ in nothing else. What they look at 20 times a second is left out.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import thread_time
from typing import Any, NamedTuple, TypeVar

import anyio

from bench.checkpoints import SHAPES, write_description
from bench.loopback import measure_from_outside, serve_on_loopback
from bench.scheduling_cost import scripted_output
from ops.machine import Machine
from runtime.actors.assemble import prepare
from runtime.actors.engine_core import EngineCore
from runtime.actors.replica import Replica
from runtime.batch import Batch, StepOutput
from runtime.config import Args
from runtime.errors import ConfigurationError, EngineFailure
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.scheduler.scheduler import Scheduler
from runtime.tokenizer.tokenizer import Tokenizer
from serve.server.process import tune_interpreter

BUDGET_US = 25.0
METRICS_BUDGET_US = 1.0
STEP_S_PER_STREAM = 80e-6  # three times the budget: the loop is idle between steps
MIN_STEP_S = 0.005
PROMPT_TOKENS = 32
PAGE_SIZE = 16
BASE_TOKENS = 16

T = TypeVar("T")


class StreamingCost(NamedTuple):
    """What the loop's thread used while `streams` clients read, scheduling included.

    Two runs that differ only in the number of tokens tell the cost of a token from that of a request.
    """

    streams: int
    tokens: int
    events: int  # that carried tokens; fewer than tokens where some were merged
    duration_s: float
    cpu_s: float  # of the loop's thread
    base_tokens: int
    base_cpu_s: float

    @property
    def token_us(self) -> float:
        """CPU time of the loop for each further streamed token."""
        return (self.cpu_s - self.base_cpu_s) / (self.tokens - self.base_tokens) * 1e6

    @property
    def request_us(self) -> float:
        """CPU time of the loop for each request without its tokens."""
        return (self.cpu_s * 1e6 - self.tokens * self.token_us) / self.streams

    @property
    def within_budget(self) -> bool:
        return self.token_us <= BUDGET_US


class MetricsCost(NamedTuple):
    """What a streamed token costs the loop, scheduling included, without metrics and with them; turn by turn."""

    streams: int
    output_tokens: int
    off_us: list[float]  # median of a turn's steps
    on_us: list[float]
    more_us: list[float]  # median of what a turn's steps with metrics took more than their neighbours without

    @property
    def added_us(self) -> float:
        """The median turn's."""
        return statistics.median(self.more_us)

    @property
    def within_budget(self) -> bool:
        return self.added_us <= METRICS_BUDGET_US


class ScriptedRunner:
    """A device that needs `step_s` for every step and computes nothing."""

    kernels_description = "none"

    def __init__(self, step_s: float) -> None:
        """Every step takes as long."""
        self._step_s = step_s
        self._due_s = 0.0

    def launch(self, batch: Batch) -> asyncio.Future[StepOutput]:
        loop = asyncio.get_running_loop()
        self._due_s = max(self._due_s, loop.time()) + self._step_s
        future: asyncio.Future[StepOutput] = loop.create_future()
        loop.call_at(self._due_s, self._finish, future, batch)
        return future

    def _finish(self, future: asyncio.Future[StepOutput], batch: Batch) -> None:
        if not future.done():
            future.set_result(scripted_output(batch))

    def call(self, verb: str, payload: Mapping[str, Any]) -> asyncio.Future[list[Any]]:
        """There is no rank."""
        raise NotImplementedError(verb)

    def finish_oldest(self) -> None:
        """Steps end by themselves."""

    async def watch(self) -> None:
        """Nothing of it can die."""
        await anyio.sleep_forever()

    def close(self) -> None:
        """There is nothing to give back."""


class AlternatingRunner(ScriptedRunner):
    """Has every other step counted by metrics, and notes what the loop's thread uses until the next one is done."""

    def __init__(self, step_s: float, streams: int) -> None:
        super().__init__(step_s)
        self._streams = streams
        self._switch: Callable[[bool], None] = lambda on: None
        self._num_steps = 0
        self._began_s: float | None = None
        self._on = True
        self.off_us: list[float] = []  # of a token; steps of all streams alone count
        self.on_us: list[float] = []

    def switch_metrics_of(self, core: EngineCore) -> None:
        """Before the first step."""
        observers, actor = core._requests.token_observers, core.schedulers[0]
        series = actor._series

        def switch(on: bool) -> None:
            core._requests.token_observers = observers if on else []
            actor._series = series if on else None

        self._switch = switch

    def turn(self) -> tuple[float, float, float]:
        """Of the steps since the last turn: without metrics, with them, and what these took more; us for a token."""
        off, on = self.off_us, self.on_us
        more = [with_them - without for without, with_them in zip(off, on)]
        self.off_us, self.on_us = [], []
        if not more:
            raise EngineFailure("No step had all streams.")
        return statistics.median(off), statistics.median(on), statistics.median(more)

    def _finish(self, future: asyncio.Future[StepOutput], batch: Batch) -> None:
        whole = len(batch.sequences) == self._streams and not batch.stats.num_prompt_tokens
        if whole and self._began_s is not None:
            used_us = (thread_time() - self._began_s) / self._streams * 1e6
            (self.on_us if self._on else self.off_us).append(used_us)
        self._on = (False, True, True, False)[self._num_steps % 4]  # so that what drifts favours neither
        self._num_steps += 1
        self._switch(self._on)
        super()._finish(future, batch)
        self._began_s = thread_time() if whole else None


def measure_streaming(*, streams: int, output_tokens: int, repetitions: int = 1) -> StreamingCost:
    """Stream `output_tokens` to each of `streams` chat clients at once; the cheapest of `repetitions` counts.

    Raises `EngineFailure` when a stream failed.
    """
    return _in_loop(_measure, streams, output_tokens, repetitions)


def measure_metrics(*, streams: int, output_tokens: int, turns: int) -> MetricsCost:
    """As `measure_streaming`, without metrics and with them, step by step, `turns` times. Raises the same."""
    return _in_loop(_compare, streams, output_tokens, turns)


def _in_loop(
    measure: Callable[[Path, int, int, int], Coroutine[Any, Any, T]],
    streams: int,
    output_tokens: int,
    times: int,
) -> T:
    if streams < 1 or times < 1:
        raise ConfigurationError("There must be at least one stream and one repetition.")
    if output_tokens <= BASE_TOKENS:
        raise ConfigurationError(f"--tokens must be more than {BASE_TOKENS}.")
    with TemporaryDirectory() as name:
        directory = Path(name)
        write_description(SHAPES["T"], directory)
        uvloop = {"use_uvloop": sys.platform != "win32"}
        return anyio.run(measure, directory, streams, output_tokens, times, backend_options=uvloop)


async def _compare(directory: Path, streams: int, output_tokens: int, turns: int) -> MetricsCost:
    runner = AlternatingRunner(_step_s(streams), streams)
    core = make_core(directory, streams, output_tokens, runner=runner, metrics=True)
    runner.switch_metrics_of(core)
    found: list[tuple[float, float, float]] = []
    async with serving(core) as url:
        await _timed_read(directory, url, streams, BASE_TOKENS)  # not counted: everything is cold
        for _ in range(turns):
            runner.off_us, runner.on_us = [], []
            await _timed_read(directory, url, streams, output_tokens)
            found.append(runner.turn())
    off, on, more = map(list, zip(*found))
    return MetricsCost(streams, output_tokens, off, on, more)


async def _measure(directory: Path, streams: int, output_tokens: int, repetitions: int) -> StreamingCost:
    core = make_core(directory, streams, output_tokens)
    async with serving(core) as url:
        await _timed_read(directory, url, streams, BASE_TOKENS)  # not counted: everything is cold
        bases, runs = [], []
        for _ in range(repetitions):
            bases.append(await _timed_read(directory, url, streams, BASE_TOKENS))
            runs.append(await _timed_read(directory, url, streams, output_tokens))
    base_cpu_s = min(cpu_s for cpu_s, _ in bases)
    cpu_s, result = min(runs, key=lambda run: run[0])
    events = sum(1 + len(request["itl_s"]) for request in result["requests"])
    return StreamingCost(
        streams=streams,
        tokens=streams * output_tokens,
        events=events,
        duration_s=result["results"]["duration_s"],
        cpu_s=cpu_s,
        base_tokens=streams * BASE_TOKENS,
        base_cpu_s=base_cpu_s,
    )


async def _timed_read(directory: Path, url: str, streams: int, output_tokens: int) -> tuple[float, dict[str, Any]]:
    began_s = thread_time()
    result = await _read(directory, url, streams, output_tokens)
    cpu_s = thread_time() - began_s
    figures = result["results"]
    if figures["failed"] or figures["output_tokens"] != streams * output_tokens:
        raise EngineFailure(f"The streams did not come back whole: {figures['errors']}.")
    return cpu_s, result


def _step_s(streams: int) -> float:
    return max(streams * STEP_S_PER_STREAM, MIN_STEP_S)


def make_core(
    directory: Path,
    streams: int,
    output_tokens: int,
    *,
    runner: ScriptedRunner | None = None,
    metrics: bool = False,
) -> EngineCore:
    """A core for `streams` sequences, with the plan of a real engine, over this or another scripted runner."""
    pages = streams * (-(-(PROMPT_TOKENS * 2 + output_tokens) // PAGE_SIZE) + 1)
    args = Args.of(
        model_path=str(directory),
        device="cpu",
        page_size=PAGE_SIZE,
        max_running_requests=streams,
        max_total_tokens=pages * PAGE_SIZE,
        enable_metrics=metrics,
    )
    plan, facts = prepare(args, Machine.probe())
    schedule = Scheduler(
        plan.scheduler,
        PrefixCache(pages, PAGE_SIZE),
        vocab_size=facts.vocab_size,
        context_length=plan.model.context_length,
    )
    runner = runner or ScriptedRunner(_step_s(streams))
    return EngineCore(plan, facts, Tokenizer.load(plan.tokenizer, facts), [Replica(plan, schedule, runner)])


@asynccontextmanager
async def serving(core: EngineCore) -> AsyncIterator[str]:
    """Run the core and serve it over a loopback socket; yields its URL."""
    up = anyio.Event()
    tune_interpreter()
    async with anyio.create_task_group() as group:
        group.start_soon(core.run, up.set)
        await up.wait()
        try:
            async with serve_on_loopback(core) as url:
                yield url
        finally:
            group.cancel_scope.cancel()


async def _read(directory: Path, url: str, streams: int, output_tokens: int) -> dict[str, Any]:
    """The result of the serving benchmark, run in another process against `url`."""
    options = [
        *("--backend", "openai-chat", "--tokenizer", str(directory), "--num-prompts", str(streams)),
        *("--random-input-len", str(PROMPT_TOKENS), "--random-output-len", str(output_tokens)),
        *("--random-range-ratio", "1", "--warmup-requests", "0", "--output-details"),
    ]
    return await measure_from_outside(url, options)
