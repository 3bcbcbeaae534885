"""Measure launch cost: of decode steps in graphs, and of steps with a prompt, with and without prompt graphs.

Steps follow each other without a pause and are launched ahead, as in real use. The result is the device thread's launch
time as a share of a step's time. Near 100 % the device waits for launches, and a graph of such steps would help.
Otherwise launches are hidden by the device's work.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

import anyio

from bench.gpu.bench import POLL_S, Bench, Model, warm_up
from bench.gpu.figure import Figure
from bench.gpu.limits import Work
from bench.gpu.online_rows import measured_runner
from bench.step import FIRST_TOKEN, make_batch
from serve.python.engine import Engine

if TYPE_CHECKING:
    from runtime.batch import Batch
    from runtime.worker.step_timer import TimedStep

IDS_ONLY = {"skip_tokenizer_init": True}
CAPTURE_TIMEOUT_S = 60
AHEAD = 2  # steps in flight in addition to the running step


def launches(bench: Bench) -> list[Figure]:
    """Measure decode rows, alone and together with prompts of several lengths, with a small and a large model."""
    models = {bench.model(name).name: bench.model(name) for name in ("qwen3-0.6b", "qwen3-8b")}
    return [figure for model in models.values() for figure in _of(bench, model)]


def _of(bench: Bench, model: Model) -> list[Figure]:
    """Measure one model with the default graphs, then its steps with prompts again, without prompt graphs."""
    rows, context, prompts = bench.sizes.launch

    async def work(engine: Engine, prompts: Sequence[int]) -> list[tuple[str, list[TimedStep]]]:
        await warm_up(engine, model, rows)
        size = engine.core.plan.cache.page_size
        return [
            (
                _way(engine, rows + prompt if prompt else 0),
                await _timed(engine, mixed_batch(rows, context, prompt, size), bench.sizes.launch_steps),
            )
            for prompt in prompts
        ]

    without = [prompt for prompt in prompts if prompt]
    figures = []
    for measured, options in ((prompts, {}), (without, {"disable_piecewise_cuda_graph": True})):
        found = bench.run(
            model, partial(work, prompts=measured), max_running_requests=rows + 1, **options, **IDS_ONLY
        )  # fmt: skip
        for prompt, (way, steps) in zip(measured, found, strict=True):
            figures += _figures(bench, model, rows, context, prompt, way, steps)
    return figures


def _way(engine: Engine, num_tokens: int) -> str:
    """Return the suffix of a row's name: how a step with this number of tokens is launched. 0: no prompt, no suffix."""
    if not num_tokens:
        return ""
    fits = num_tokens <= max(engine.core.plan.graphs.prompt_sizes, default=0)
    return ", in graphs of prompts" if fits else ", without graphs of prompts"


def _figures(
    bench: Bench, model: Model, rows: int, context: int, prompt: int, way: str, steps: Sequence[TimedStep]
) -> list[Figure]:
    what = f"{rows} rows decode after {context} tokens"
    what += f" beside a prompt of {prompt}{way}" if prompt else ""
    period_s, launch_s = median(step.period_s for step in steps), median(step.launch_s for step in steps)
    cost = bench.cost(model)
    least = cost.decode([context] * rows)
    least = Work(least.bytes, least.operations + (cost.prompt(prompt).operations if prompt else 0))
    limit_ms, bound = 1e3 * bench.limits.seconds(least), bench.limits.bound(least)
    return [
        Figure(f"{what}: a step", model.name, 1e3 * period_s, "ms", limit_ms, bound, lower_is_better=True),
        Figure(f"{what}: launching it, of its time", model.name, 100 * launch_s / period_s, "%"),
    ]


async def _timed(engine: Engine, batch: Batch, number: int) -> list[TimedStep]:
    """Time consecutive steps of this batch. The engine must be idle otherwise."""
    runner = measured_runner(engine.core)
    for _ in range(2):  # compiles kernels, and requests the capture of the graphs that the batch needs
        await asyncio.shield(runner.launch(batch))
    with anyio.fail_after(CAPTURE_TIMEOUT_S):
        while runner.capturing:
            await anyio.sleep(POLL_S)
    await asyncio.shield(runner.launch(batch))
    timer, flying = runner.time_steps(), deque()
    for _ in range(number):
        flying.append(runner.launch(batch))
        if len(flying) > AHEAD:
            await asyncio.shield(flying.popleft())
    for step in flying:
        await asyncio.shield(step)
    return timer.steps[AHEAD:]


def mixed_batch(num_rows: int, context_len: int, prompt_len: int, page_size: int) -> Batch:
    """Return a batch of decode rows with this number of cached tokens and a prompt as the last row, each with its own
    pages.
    """
    import numpy as np

    decode = make_batch(num_rows, context_len, 1, page_size)
    if not prompt_len or decode.sampling is None:
        return decode
    first, width = decode.page_table.size, -(-prompt_len // page_size)
    table = np.zeros((num_rows + 1, max(width, decode.page_table.shape[1])), np.int32)
    table[:-1, : decode.page_table.shape[1]] = decode.page_table
    table[-1, :width] = np.arange(first, first + width)
    rows = np.arange(num_rows + 1, dtype=np.int32)
    return replace(
        decode,
        sequences=(*decode.sequences, None),
        starts=np.append(decode.starts, np.int32(0)),
        counts=np.append(decode.counts, np.int32(prompt_len)),
        sequence_indices=rows,
        token_ids=np.full(num_rows + prompt_len, FIRST_TOKEN, np.int32),
        page_table=table,
        sampling=replace(
            decode.sampling,
            positions=np.append(rows[:-1], np.int32(num_rows + prompt_len - 1)),
            row_of=rows,
            greedy=np.ones(num_rows + 1, np.bool_),
            uniform=np.zeros(num_rows + 1, np.float32),
        ),
    )
