"""Rows over HTTP: engine and server run in this process, clients in another process."""

from __future__ import annotations

import gc
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from bench.gpu.bench import SEED, Bench, Model, warm_up
from bench.gpu.figure import Figure
from bench.loopback import measure_from_outside, serve_on_loopback
from runtime.actors.engine_core import EngineCore
from runtime.errors import ConfigurationError
from serve.bench.metrics import percentile
from serve.python.engine import Engine
from serve.server.process import tune_interpreter

if TYPE_CHECKING:
    from runtime.worker.model_runner import ModelRunner
    from runtime.worker.step_timer import StepTimer

EDGE = 0.1  # share of the steps at each end that are excluded, because decoding is not steady there


def online(bench: Bench) -> list[Figure]:
    """Time to the first token and time between tokens at several request rates."""
    model = bench.model("qwen3-8b")

    async def work(engine: Engine) -> list[dict[str, Any]]:
        await warm_up(engine, model, int(max(bench.sizes.rates)))
        async with _serving(engine) as url:
            return [await _at_rate(bench, model, url, rate) for rate in bench.sizes.rates]

    found = bench.run(model, work)
    return [
        figure for rate, results in zip(bench.sizes.rates, found) for figure in _latencies(bench, model, rate, results)
    ]


async def _at_rate(bench: Bench, model: Model, url: str, rate: float) -> dict[str, Any]:
    length, output = bench.sizes.online
    number = max(1, round(rate * bench.sizes.online_s))
    options = [
        *("--backend", "native", "--send", "ids", "--vocab-size", str(model.shape.vocab)),
        *("--num-prompts", str(number), "--request-rate", str(rate), "--random-range-ratio", "1"),
        *("--random-input-len", str(length), "--random-output-len", str(output)),
        *("--seed", str(SEED + round(rate)), "--flush-cache"),
    ]
    return (await measure_from_outside(url, options))["results"]


def _latencies(bench: Bench, model: Model, rate: float, results: dict[str, Any]) -> list[Figure]:
    length, output = bench.sizes.online
    what = f"{rate:g} requests/s, {length} tokens in, {output} out"
    rows = max(1.0, results["mean_concurrency"])
    first, gap = (
        bench.cost(model).prompt(length),
        bench.cost(model).decode([length + output / 2] * round(rows)),
    )
    figures = []
    for name, work, percents in (("ttft", first, ("median", "p99")), ("itl", gap, ("median", "p99"))):
        limit_ms, bound = 1e3 * bench.limits.seconds(work), bench.limits.bound(work)
        figures += [
            Figure(
                f"{what}: {name.upper()} {percent}",
                model.name,
                results[f"{name}_ms"][percent],
                "ms",
                limit_ms,
                bound,
                lower_is_better=True,
            )
            for percent in percents
        ]
    return figures


def occupancy(bench: Bench) -> list[Figure]:
    """Share of time in which the device runs steps while the same process serves chat streams."""
    model, (streams, length, output) = bench.model("qwen3-8b"), bench.sizes.streams
    path = bench.path(model)

    async def work(engine: Engine) -> StepTimer:
        await warm_up(engine, model, streams)
        options = [
            *("--backend", "openai-chat", "--tokenizer", path, "--num-prompts", str(streams)),
            *("--random-range-ratio", "1", "--random-input-len", str(length)),
            *("--random-output-len", str(output), "--warmup-requests", "0", "--seed", str(SEED)),
        ]
        async with _serving(engine) as url:
            measured = measured_runner(engine.core).time_steps()
            await measure_from_outside(url, options)
        return measured

    return [
        Figure(f"{streams} chat streams: device busy, {name}", model.name, value, "%", 100.0)
        for name, value in busy_percentages(bench.run(model, work, max_running_requests=streams)).items()
    ]


def measured_runner(core: EngineCore) -> ModelRunner:
    """Return the only runner of this process. Raises `ConfigurationError` for an engine with several runners."""
    from runtime.worker.model_runner import ModelRunner

    runners = core.runners
    if len(runners) != 1 or not isinstance(runners[0], ModelRunner):
        raise ConfigurationError("Occupancy is that of one device: leave out --tp-size, --pp-size and --dp-size.")
    return runners[0]


def busy_percentages(measured: StepTimer) -> dict[str, float]:
    """Return the mean over steady decoding, and the 10th and 90th percentile of its steps."""
    steps = measured.steps
    first, last = int(len(steps) * EDGE), int(len(steps) * (1 - EDGE))
    shares = sorted(100 * share for share in measured.shares()[first:last])
    steady = steps[first : last + 1]
    busy_s, all_s = sum(step.busy_s for step in steady[:-1]), sum(step.period_s for step in steady[1:])
    return {
        "mean": min(100.0, 100 * busy_s / all_s),
        "p10": percentile(shares, 10),
        "p90": percentile(shares, 90),
    }


@asynccontextmanager
async def _serving(engine: Engine) -> AsyncIterator[str]:
    """Serve the engine's application, in an interpreter that is tuned like a server's. Yields its URL."""
    before, switch_s = gc.get_threshold(), sys.getswitchinterval()
    tune_interpreter()
    try:
        async with serve_on_loopback(engine.core) as url:
            yield url
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
        sys.setswitchinterval(switch_s)
