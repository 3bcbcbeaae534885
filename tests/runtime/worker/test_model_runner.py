"""The runner with its threads and a real scheduler."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

import fake_runner
import late_steps
from fake_device import LateDevice
from late_steps import CONTEXT, PAGE_SIZE, VOCAB_SIZE
from runtime.actors.detokenizer import DetokenizerActor
from runtime.actors.live_requests import LiveRequests
from runtime.actors.output_stream import OutputStream
from runtime.actors.scheduler import SchedulerActor
from runtime.config.resolve.graph_sizes import Buckets
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.scheduler.scheduler import Scheduler
from runtime.worker.cuda_graph import CudaGraphRunner
from runtime.worker.model_runner import ModelRunner

NUM_PAGES, NUM_SEQUENCES = 24, 4
PROMPTS = [([3 + i, 9, 4 + 3 * i, 7, 5 + i][: 1 + i % 5], 8 + 2 * i) for i in range(9)]


def graphed_runner(device: LateDevice) -> tuple[ModelRunner, CudaGraphRunner]:
    steps = late_steps.Steps(NUM_PAGES, NUM_SEQUENCES, device)
    graphs = steps.use_graphs(Buckets((1, 2, 4)))
    return ModelRunner(steps.executor), graphs


async def outputs(runner: ModelRunner) -> list[list[int]]:
    plan = fake_runner.make_plan(max_running=NUM_SEQUENCES)
    cache = PrefixCache(NUM_PAGES, PAGE_SIZE)
    schedule = Scheduler(plan, cache, vocab_size=VOCAB_SIZE, context_length=CONTEXT)
    requests = LiveRequests()
    detokenizer = DetokenizerActor(None, requests)
    actor = SchedulerActor(schedule, runner, plan, requests, detokenizer)
    outputs: list[OutputStream] = []
    for sequence in late_steps.sequences_of(PROMPTS):
        live = requests.add(sequence.request)
        live.sequences = [sequence]
        outputs.append(live.output)
        actor.admit(live)
    running = [asyncio.create_task(part) for part in (actor.run(), detokenizer.run())]
    chunks = [await output.whole() for output in outputs]
    for task in running:
        task.cancel()
    await asyncio.wait(running)
    return [chunk.ids for [chunk] in chunks]


@pytest.mark.parametrize("seed", range(2))
async def test_graphs_are_captured_while_requests_are_answered(seed: int):
    runner, graphs = graphed_runner(LateDevice(Random(seed), 0.3))
    runner._capture._steps_between = 4  # pyright: ignore[reportOptionalMemberAccess]
    try:
        assert not graphs.captured
        expected = late_steps.outputs(PROMPTS)
        assert await outputs(runner) == expected
        assert graphs.captured == {1, 2, 4}
        assert await outputs(runner) == expected
    finally:
        await asyncio.to_thread(runner.close)


async def test_a_quiet_engine_captures_by_itself():
    runner, graphs = graphed_runner(LateDevice(Random(0), 0.3))
    try:
        await outputs(runner)
        while len(graphs.captured) < 3:
            await asyncio.sleep(0.01)
        assert await outputs(runner) == late_steps.outputs(PROMPTS)
    finally:
        await asyncio.to_thread(runner.close)
