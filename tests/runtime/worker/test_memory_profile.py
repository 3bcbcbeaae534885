from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import fake_core
import late_steps
from runtime.config.plan import GraphPlan, Plan
from runtime.errors import ConfigurationError
from runtime.kv_cache.sizing import StepMemory
from runtime.layers.forward_batch import ForwardBatch
from runtime.worker.device import CpuDevice, MemoryUse
from runtime.worker.memory_profile import GRAPH_BYTES, profile_memory
from runtime.worker.sampler import Sampler

TOKEN_BYTES = 1000


class Metered(CpuDevice):
    """A fake whose steps take a number of bytes per token, with memory for a number of tokens."""

    def __init__(self, room: int = 10**6) -> None:
        super().__init__()
        self.room = room
        self.num_tokens = 0
        self.measured: list[int] = []

    def measure(self, run: Callable[[], object]) -> MemoryUse:
        run()
        self.measured.append(self.num_tokens)
        return MemoryUse(self.num_tokens * TOKEN_BYTES, 0)


def profiled(device: Metered, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> StepMemory:
    given = fake_core.make_plan()
    schedule = replace(given.scheduler, chunk_tokens=None, max_prefill_tokens=100, max_running=30, mixed=False)
    plan: Plan = replace(
        given,
        model=replace(given.model, context_length=late_steps.CONTEXT),
        cache=replace(given.cache, page_size=4, kv_dtype="float32"),
        scheduler=replace(schedule, **{k: v for k, v in changes.items() if k != "graphs"}),
        graphs=changes.get("graphs", GraphPlan()),
    )
    model = late_steps.model()

    def counted(batch: ForwardBatch) -> torch.Tensor:
        device.num_tokens = batch.num_tokens
        if device.num_tokens > device.room:
            raise torch.OutOfMemoryError("no room")
        return type(model).forward(model, batch)

    monkeypatch.setattr(model, "forward", counted)
    return profile_memory(late_steps.Steps(1, plan.scheduler.max_running, device).executor, plan)


def test_largest_step_is_run_and_takes_what_it_takes(monkeypatch: pytest.MonkeyPatch):
    device = Metered()
    steps = profiled(device, monkeypatch)
    assert device.measured == [100, 30]
    assert steps.measured
    assert (steps.activation_bytes, steps.graph_bytes) == (100 * TOKEN_BYTES, 0)


def test_many_rows_of_one_token_may_be_the_largest_step(monkeypatch: pytest.MonkeyPatch):
    steps = profiled(Metered(), monkeypatch, chunk_tokens=8, max_running=50)
    assert steps.activation_bytes == 50 * TOKEN_BYTES


def test_graphs_take_what_the_largest_of_them_computes_with(monkeypatch: pytest.MonkeyPatch):
    steps = profiled(Metered(), monkeypatch, graphs=GraphPlan(sizes=(1, 2, 8)))
    assert steps.graph_bytes == 8 * TOKEN_BYTES + 2 * 3 * GRAPH_BYTES


def test_graphs_of_prompts_take_what_the_largest_step_with_a_graph_computes_with(monkeypatch: pytest.MonkeyPatch):
    device = Metered()
    steps = profiled(device, monkeypatch, graphs=GraphPlan(prompt_sizes=(8, 70)))
    assert steps.graph_bytes == 70 * TOKEN_BYTES + 2 * 2 * GRAPH_BYTES


def test_step_that_does_not_fit_is_refused_before_anything_is_served(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigurationError, match="step of 100 tokens .* --chunked-prefill-size"):
        profiled(Metered(room=99), monkeypatch)


def test_rows_choose_in_the_way_that_takes_most(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []
    sample = Sampler.sample

    def watched(self: Sampler, logits: torch.Tensor, batch: Any, staged: Any) -> Any:
        sampling = batch.sampling
        seen.append((len(logits), bool(sampling.greedy.any()), float(sampling.params["top_p"].max())))
        return sample(self, logits, batch, staged)

    monkeypatch.setattr(Sampler, "sample", watched)
    profiled(Metered(), monkeypatch)
    assert seen[-1] == (30, False, pytest.approx(0.9))
