"""Replicas start concurrently and without blocking the event loop, and either completely or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModel

import tiny_checkpoints
from ops.machine import Machine
from runtime.actors.assemble import prepare
from runtime.actors.replica import Replica, start_replica, start_replicas
from runtime.batch import Batch, Sampling, StepOutput
from runtime.config import Args
from runtime.config.model_facts import ModelFacts
from runtime.config.plan import Plan
from runtime.distributed import worker_group
from runtime.errors import EngineFailure, OutOfMemory
from runtime.worker.cpu_graph import CpuGraph
from runtime.worker.model_runner import ModelRunner
from runtime.worker.worker import ModelWorker

PAGE_SIZE = 4
PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12], [13, 14, 15]]


def path() -> str:
    return tiny_checkpoints.cached("llama", vocab_size=131, max_position_embeddings=512, head_dim=16)


def planned(**options: Any) -> tuple[Plan, ModelFacts]:
    args = Args.of(
        model_path=path(),
        skip_tokenizer_init=True,
        dtype="float32",
        page_size=PAGE_SIZE,
        max_total_tokens=256,
        max_running_requests=4,
        **options,
    )
    return prepare(args, Machine.probe())


def workers() -> list[list[str]]:
    """Return the command lines of this process's worker processes. Other child processes, for example a compiler, do
    not count.
    """
    found: list[list[str]] = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            found.append(child.cmdline())
    return [command for command in found if "runtime.distributed.worker_process" in command]


def prompt_batch(prompts: Sequence[Sequence[int]], *, vectors: Sequence[int] = ()) -> Batch:
    """Return a batch of whole prompts. `vectors` are the rows that compute an embedding; other rows choose a token."""
    rows = np.array([row for row in range(len(prompts)) if row not in vectors], np.int32)
    width = -(-max(map(len, prompts)) // PAGE_SIZE)
    sampling = Sampling(
        positions=np.cumsum([len(prompt) for prompt in prompts], dtype=np.int32)[rows] - 1,
        row_of=rows,
        greedy=np.ones(len(rows), np.bool_),
        uniform=np.zeros(len(rows), np.float32),
    )
    nobody: Any = None
    return Batch(
        number=0,
        sequences=(nobody,) * len(prompts),
        starts=np.zeros(len(prompts), np.int32),
        counts=np.array([len(prompt) for prompt in prompts], np.int32),
        sequence_indices=np.arange(len(prompts), dtype=np.int32),
        token_ids=np.concatenate([np.array(prompt, np.int32) for prompt in prompts]),
        page_table=np.arange(len(prompts) * width, dtype=np.int32).reshape(len(prompts), width),
        sampling=sampling if len(rows) else None,
        embedding_rows=np.array(vectors, np.int32) if len(vectors) else None,
    )


async def step(replica: Replica, batch: Batch) -> StepOutput:
    """Run one step of a replica, watched as in production."""
    watching = asyncio.create_task(replica.runner.watch())
    future = replica.runner.launch(batch)
    replica.runner.finish_oldest()
    try:
        return await asyncio.wait_for(asyncio.shield(future), 30)
    finally:
        watching.cancel()
        await asyncio.wait([watching])


def vectors_of_transformers(prompts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    model = AutoModel.from_pretrained(path(), dtype=torch.float32)
    with torch.inference_mode():
        last = [model(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in prompts]
    return [vector / vector.norm() for vector in last]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one process"),
        pytest.param({"attention_backend": "torch_native"}, id="torch"),
        pytest.param({"tp_size": 2}, id="ranks"),
        pytest.param({"pp_size": 2}, id="stages"),
        pytest.param({"tp_size": 2, "pp_size": 2}, id="stages of ranks", marks=pytest.mark.slow),
    ],
)
async def test_vectors_are_those_of_transformers_beside_rows_that_choose_tokens(options: dict[str, Any]):
    replica = await start_replica(*planned(**options), 0)
    try:
        plain = await step(replica, prompt_batch(PROMPTS))
        mixed = await step(replica, prompt_batch(PROMPTS, vectors=[0, 2]))
        alone = await step(replica, prompt_batch(PROMPTS, vectors=[0, 1, 2]))
    finally:
        await asyncio.to_thread(replica.runner.close)
    assert plain.embeddings is None
    assert mixed.tokens == [[], plain.tokens[1], []]
    assert alone.tokens == [[], [], []]
    assert mixed.embeddings is not None
    assert alone.embeddings is not None
    assert mixed.embeddings[1] is None
    expected = vectors_of_transformers(PROMPTS)
    for row in range(3):
        assert torch.allclose(torch.tensor(alone.embeddings[row]), expected[row], atol=1e-5)
    for row in (0, 2):
        assert torch.allclose(torch.tensor(mixed.embeddings[row]), expected[row], atol=1e-5)


def spy(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[threading.Thread]:
    """Record the threads that call this function."""
    threads: list[threading.Thread] = []
    original = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread())
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, called)
    return threads


async def test_vectors_come_from_the_cpu_graph(monkeypatch: pytest.MonkeyPatch):
    computed = spy(monkeypatch, CpuGraph, "hidden")
    replica = await start_replica(*planned(), 0)
    await step(replica, prompt_batch(PROMPTS, vectors=[1]))
    await asyncio.to_thread(replica.runner.close)
    assert [thread.name for thread in computed] == ["penstock-device"]


async def test_nothing_that_takes_long_runs_on_the_loop(monkeypatch: pytest.MonkeyPatch):
    started = spy(monkeypatch, worker_group, "start_process")
    loaded = spy(monkeypatch, ModelWorker, "__init__")
    measured = spy(monkeypatch, ModelWorker, "memory")
    prepared = spy(monkeypatch, ModelWorker, "lead")
    replica = await start_replica(*planned(tp_size=2), 0)
    await asyncio.to_thread(replica.runner.close)
    for threads in (started, loaded, measured, prepared):
        assert threads
        assert threading.main_thread() not in threads


async def test_cpu_graph_is_recorded_beside_the_loop(monkeypatch: pytest.MonkeyPatch):
    recorded = spy(monkeypatch, CpuGraph, "__init__")
    replica = await start_replica(*planned(), 0)
    await asyncio.to_thread(replica.runner.close)
    assert recorded
    assert threading.main_thread() not in recorded


async def test_replicas_load_at_the_same_time_and_are_sized_when_all_have_loaded(
    monkeypatch: pytest.MonkeyPatch,
):
    together = threading.Barrier(3)
    events: list[str] = []
    load, memory = ModelWorker.__init__, ModelWorker.memory

    def loads(self: ModelWorker, *arguments: Any) -> None:
        together.wait(10)  # raises BrokenBarrierError unless all three arrive
        load(self, *arguments)
        events.append("loaded")

    def measures(self: ModelWorker) -> dict[str, int]:
        events.append("measured")
        return memory(self)

    monkeypatch.setattr(ModelWorker, "__init__", loads)
    monkeypatch.setattr(ModelWorker, "memory", measures)
    replicas = await start_replicas(*planned(dp_size=3), range(3))
    for replica in replicas:
        await asyncio.to_thread(replica.runner.close)
    assert events[:4] == ["loaded", "loaded", "loaded", "measured"]


def fail_in(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception, *, when: int) -> None:
    """Make the worker's method raise at its n-th call."""
    original: Callable[..., Any] = getattr(ModelWorker, name)
    calls: list[object] = []

    def failing(self: ModelWorker, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        if len(calls) == when:
            raise error
        return original(self, *args, **kwargs)

    monkeypatch.setattr(ModelWorker, name, failing)


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemory("The device ran out of memory in a step."),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."),
    ],
)
async def test_every_lack_of_memory_at_the_start_gives_the_same_advice(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fail_in(monkeypatch, "__init__", error, when=1)
    with pytest.raises(EngineFailure, match="Lower --mem-fraction-static or --max-total-tokens") as caught:
        await start_replica(*planned(), 0)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("name", ["__init__", "join", "lead"])
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB"), "too little memory"),
        (OSError(28, "No space left on device"), "could not be started"),
    ],
)
async def test_what_the_system_refuses_is_an_error_of_ours_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, name: str, error: Exception, message: str
):
    fail_in(monkeypatch, name, error, when=1)
    with pytest.raises(EngineFailure, match=message) as caught:
        await start_replica(*planned(), 0)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("name", ["__init__", "join", "lead"])
async def test_a_failed_start_gives_back_every_replica(monkeypatch: pytest.MonkeyPatch, name: str):
    before = {thread for thread in threading.enumerate() if "penstock" in thread.name}
    closed = spy(monkeypatch, ModelRunner, "close")
    fail_in(monkeypatch, name, OSError(28, "No space left on device"), when=2)
    with pytest.raises(EngineFailure):
        await start_replicas(*planned(dp_size=2, tp_size=2), range(2))
    assert not workers()
    assert len(closed) == (0 if name == "__init__" else 1)
    after = {thread for thread in threading.enumerate() if "penstock" in thread.name}
    assert after <= before


async def test_replica_that_was_never_watched_is_closed_at_once():
    replica = await start_replica(*planned(tp_size=2), 0)
    assert len(workers()) == 1
    began = time.monotonic()
    await asyncio.to_thread(replica.runner.close)
    assert time.monotonic() - began < worker_group.EXIT_TIMEOUT_S / 2
    assert not workers()


async def test_start_says_which_kernels_run(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "penstock.core"):
        replica = await start_replica(*planned(), 0)
    assert isinstance(replica.runner, ModelRunner)
    description = replica.runner.kernels_description
    await asyncio.to_thread(replica.runner.close)
    assert f"Kernels: {description}" in [record.getMessage() for record in caplog.records]
    for operation, file in replica.plan.kernels.choices.items():
        assert f"{operation} {file}" in description
