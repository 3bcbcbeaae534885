from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

import fake_core
import late_heads
import late_steps
import pretended_gpu
from fake_device import LateDevice
from runtime.config.plan import DraftPlan, GraphPlan, Plan
from runtime.errors import ConfigurationError
from runtime.kv_cache.sizing import StepMemory
from runtime.layers.forward_batch import ForwardBatch
from runtime.worker import worker as worker_module
from runtime.worker.device import CpuDevice, MemoryUse
from runtime.worker.memory_profile import GRAPH_BYTES, profile_memory
from runtime.worker.sampler import Sampler
from runtime.worker.worker import ModelWorker
from runtime.worker.worker_setup import DRAFT, TARGET, CacheSetup, ModelSetup, WorkerSetup

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


def test_rows_with_drafts_sample_more_positions(monkeypatch: pytest.MonkeyPatch):
    steps = profiled(Metered(), monkeypatch, chunk_tokens=8, max_running=50, max_lookup_drafts=3, max_drafts=3)
    assert steps.activation_bytes == 200 * TOKEN_BYTES
    steps = profiled(Metered(), monkeypatch, chunk_tokens=8, max_running=50, max_drafts=3, max_step_drafts=16)
    assert steps.activation_bytes == 66 * TOKEN_BYTES


def test_graphs_take_what_the_largest_of_them_computes_with(monkeypatch: pytest.MonkeyPatch):
    steps = profiled(Metered(), monkeypatch, graphs=GraphPlan(sizes=(1, 2, 8)))
    assert steps.graph_bytes == 8 * TOKEN_BYTES + 2 * 3 * GRAPH_BYTES


def test_steps_with_branches_have_graphs_of_their_own(monkeypatch: pytest.MonkeyPatch):
    branches = {"max_lookup_drafts": 3, "draft_breadths": (1, 2)}
    steps = profiled(Metered(), monkeypatch, graphs=GraphPlan(sizes=(1, 2, 8)), **branches)
    assert steps.graph_bytes == 8 * TOKEN_BYTES + 4 * 3 * GRAPH_BYTES


def test_graphs_of_prompts_take_what_the_largest_step_with_a_graph_computes_with(monkeypatch: pytest.MonkeyPatch):
    device = Metered()
    steps = profiled(device, monkeypatch, graphs=GraphPlan(prompt_sizes=(8, 70)))
    assert steps.graph_bytes == 70 * TOKEN_BYTES + 2 * 2 * GRAPH_BYTES


def test_step_that_does_not_fit_is_refused_before_anything_is_served(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigurationError, match="step of 100 tokens .* --chunked-prefill-size"):
        profiled(Metered(room=99), monkeypatch)


@pytest.mark.parametrize("kind", ["EAGLE3", "NEXTN"])
def test_a_draft_head_is_measured_with_the_states_that_it_reads(kind: str, monkeypatch: pytest.MonkeyPatch):
    """The drafter's tables are as large as the profile run says."""
    family = "qwen3" if kind == "EAGLE3" else "glm4_moe"
    monkeypatch.setattr(worker_module, "open_device", lambda _: LateDevice(Random(0), haste=1))
    monkeypatch.setattr(worker_module, "_select", lambda *_, **__: (pretended_gpu.kernels(), False))
    setups = {
        TARGET: ModelSetup(late_steps.facts(family), late_steps.model_plan(family)),
        DRAFT: ModelSetup(*late_heads.facts_and_plan(kind, family)),
    }
    given = fake_core.make_plan()
    plan = replace(
        given,
        model=replace(given.model, context_length=late_steps.CONTEXT),
        scheduler=replace(given.scheduler, max_running=6, max_drafts=4, max_model_drafts=4),
        cache=replace(given.cache, page_size=4, kv_dtype="float32"),
        graphs=GraphPlan(sizes=(2,), prompt_sizes=(8,)),
        draft=DraftPlan(algorithm=kind),
    )
    worker = ModelWorker(WorkerSetup.of(plan, setups, 0, 0))
    steps = worker.profile_memory(plan)
    assert steps.measured
    worker.join(CacheSetup(num_pages=12, page_size=4, kv_dtype="float32", num_sequences=6), None)
    drafter: Any = worker.lead(plan, TARGET)._drafter
    tables = [drafter._states, drafter._ids, drafter._last_tokens]
    assert steps.table_bytes == sum(each.nbytes for each in tables)
    assert steps.reserved_bytes > steps.table_bytes
    assert drafter.graphs.num_waiting == 1


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
