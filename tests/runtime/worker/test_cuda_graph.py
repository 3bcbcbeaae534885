from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import late_steps
import recorded_flashinfer
from fake_device import LateDevice, LateEvent, LateGraph
from late_steps import PAGE_SIZE, Steps, batch, replays
from ops.attention import with_flashinfer
from ops.attention.with_flashinfer import FlashInfer
from runtime.batch import Batch, Bias
from runtime.config.resolve.graph_sizes import Buckets
from runtime.layers.forward_batch import ForwardBatch
from runtime.loading.loader import load_model
from runtime.request import LogprobParams
from runtime.worker.cuda_graph import CudaGraphRunner
from runtime.worker.sampler import Sampler

NUM_PAGES = 12
PROMPTS = [([3 + i, 9, 4 + 3 * i, 7, 5 + i][: 1 + i % 5], 3 + 2 * (i * 7 % 5)) for i in range(9)]


def steps(*sizes: int, padding: bool = True, capture: bool = True, **options: Any) -> Steps:
    made = Steps(NUM_PAGES, 4, LateDevice(Random(0)))
    options = {"choice": None, **options}
    graphs = made.use_graphs(Buckets(sizes, padding), **options)
    while capture and graphs.capture_next():
        pass
    return made


def test_batches_of_single_tokens_replay_and_all_others_run_eagerly(monkeypatch: pytest.MonkeyPatch):
    run = replays(monkeypatch, steps(1, 3))
    assert [run(batch(rows)) for rows in (1, 2, 3)] == [True, True, True]
    assert not run(batch(4))  # larger than any graph
    assert not run(batch(2, count=2))


def test_without_padding_only_exact_sizes_replay(monkeypatch: pytest.MonkeyPatch):
    run = replays(monkeypatch, steps(1, 3, padding=False))
    assert [run(batch(rows)) for rows in (1, 2, 3)] == [True, False, True]


def test_row_that_is_longer_than_the_page_table_runs_eagerly(monkeypatch: pytest.MonkeyPatch):
    run = replays(monkeypatch, steps(1, max_pages=2))
    assert run(batch(1, start=2 * PAGE_SIZE - 1))
    assert not run(batch(1, start=2 * PAGE_SIZE))


def test_largest_size_is_captured_first_and_sizes_run_eagerly_until_then(monkeypatch: pytest.MonkeyPatch):
    made = steps(1, 2, 4, capture=False)
    graphs: Any = made.forward
    run = replays(monkeypatch, made)
    assert graphs.capture_next()
    assert graphs.captured == {4}
    assert [run(batch(1)), run(batch(3))] == [False, True]
    assert graphs.capture_next()
    assert not graphs.capture_next()
    assert graphs.captured == {1, 2, 4}
    assert not graphs.capture_next()


def test_size_of_an_eager_step_is_captured_next(monkeypatch: pytest.MonkeyPatch):
    made = steps(1, 2, 4, 8, capture=False)
    graphs: Any = made.forward
    run = replays(monkeypatch, made)
    assert not run(batch(1))
    assert graphs.num_missed() == 1
    graphs.capture_next()
    assert graphs.num_missed() == 0
    assert graphs.captured == {8}  # its memory serves all sizes
    assert not run(batch(2))
    assert not run(batch(1))
    for captured in ({1, 8}, {1, 2, 8}, {1, 2, 4, 8}):
        graphs.capture_next()
        assert graphs.captured == captured


def test_a_step_without_its_graph_requests_that_graph_alone():
    made = late_steps.Steps(12, 4, LateDevice(Random(0)))
    graphs = made.use_graphs(Buckets((1, 2)))  # these graphs sample; others would end at hidden states
    made.launch(batch(1))
    made.finish_oldest()
    assert graphs.num_missed() == 1
    assert graphs.num_waiting == 2


def test_rows_that_left_become_padding_again():
    made = steps(4)
    graphs: Any = made.forward
    for rows in (4, 1):
        made.launch(batch(rows))
        made.finish_oldest()
    attention = graphs._buffers.attention
    assert attention.slot_mapping[1:].tolist() == [NUM_PAGES * PAGE_SIZE] * 3
    assert attention.starts.tolist() == [5, 0, 0, 0]
    assert attention.page_table[1:].unique().tolist() == [NUM_PAGES]


def test_capture_writes_to_no_page_but_the_scratch_page():
    made = steps(2, 4, capture=False)
    graphs: Any = made.forward
    graphs.capture_next()
    made.launch(batch(4))
    made.finish_oldest()
    before = [tensor[:NUM_PAGES].clone() for layer in range(2) for tensor in made.pool[layer][:2]]
    for layer in range(2):
        for tensor in made.pool[layer][:2]:
            tensor[:NUM_PAGES] += 1
    graphs.capture_next()
    made.device.settle()  # pyright: ignore[reportAttributeAccessIssue]
    after = [tensor[:NUM_PAGES] for layer in range(2) for tensor in made.pool[layer][:2]]
    assert all(torch.equal(one + 1, other) for one, other in zip(before, after, strict=True))


def test_failed_capture_leaves_the_others_usable(monkeypatch: pytest.MonkeyPatch):
    made = steps(1, 4, capture=False)
    graphs: Any = made.forward
    graphs.capture_next()
    monkeypatch.setattr(made.device, "capture", lambda run: run(None))
    with pytest.raises(TypeError):
        graphs.capture_next()
    run = replays(monkeypatch, made)
    assert [run(batch(3)), run(batch(1))] == [True, False]


@pytest.mark.parametrize("allowed", [False, True])
def test_garbage_collector_rests_during_a_capture_unless_it_is_allowed(allowed: bool, monkeypatch: pytest.MonkeyPatch):
    made = steps(1, capture=False, collect_garbage=allowed)
    seen: list[bool] = []
    capture = made.device.capture

    def watched(run: Any) -> Any:
        seen.append(gc.isenabled())
        return capture(run)

    monkeypatch.setattr(made.device, "capture", watched)
    made.forward.capture_next()  # pyright: ignore[reportAttributeAccessIssue]
    assert seen == [allowed]
    assert gc.isenabled()


def test_profile_of_each_capture_is_logged(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "penstock.core"):
        steps(1, 2, profile=True)
    tables = [record.getMessage() for record in caplog.records if "Self CPU" in record.getMessage()]
    assert [table.split("\n")[0][-6:] for table in tables] == ["2 rows", "1 rows"]


# --- tokens ---


def ways(made: Steps, monkeypatch: pytest.MonkeyPatch) -> Callable[[Batch], str]:
    """Return how a batch gets its tokens: from a graph, or from the sampler after a graph."""
    calls: list[str] = []
    replay, sample = LateGraph.replay, Sampler.sample
    monkeypatch.setattr(LateGraph, "replay", lambda graph: calls.append("graph") or replay(graph))
    monkeypatch.setattr(Sampler, "sample", lambda *given: calls.append("sampler") or sample(*given))

    def run(one: Batch) -> str:
        calls.clear()
        made.launch(one)
        made.finish_oldest()
        return ", ".join(calls)

    return run


def choosing(num_rows: int, **changes: Any) -> Batch:
    one = batch(num_rows)
    assert one.sampling is not None
    return replace(one, sampling=replace(one.sampling, **changes))


def test_a_graph_goes_on_to_tokens_where_all_rows_sample_and_want_nothing_more(
    monkeypatch: pytest.MonkeyPatch,
):
    made = steps(2, 4, choice=late_steps.choice())
    graphs: Any = made.forward
    run = ways(made, monkeypatch)
    drawn = np.zeros(3, np.bool_)
    warm = {"temperature": np.full(3, 0.8, np.float32)}
    assert run(choosing(3)) == "graph"
    assert run(choosing(3, greedy=drawn, params=warm)) == "graph"
    assert not graphs.is_waiting()
    bias = Bias(np.zeros(1, np.int64), np.ones(1, np.int64), np.ones(1, np.float32))
    assert run(choosing(3, bias=bias)) == "sampler"
    while graphs.is_waiting():  # a step with rows that need more than tokens has run
        graphs.capture_next()
    assert run(choosing(3, bias=bias)) == "graph, sampler"
    assert run(choosing(3, logprobs=(None, LogprobParams(top=1), None))) == "graph, sampler"
    first_two = {
        "positions": np.arange(2, dtype=np.int32),
        "row_of": np.arange(2, dtype=np.int32),
        "greedy": drawn[:2],
        "uniform": np.zeros(2, np.float32),
    }
    assert run(choosing(3, **first_two)) == "graph, sampler"
    assert run(choosing(3)) == "graph"
    assert run(batch(2, count=2)) == "sampler"


def test_a_limit_that_the_captured_kernel_lacks_is_left_to_the_sampler(monkeypatch: pytest.MonkeyPatch):
    made = steps(2, choice=replace(late_steps.choice(), limits=frozenset({"top_k"})))
    run = ways(made, monkeypatch)
    drawn = np.array([False, True])
    top_p = {"top_p": np.array([0.5, 1], np.float32)}
    assert run(choosing(2, greedy=drawn, params={"top_k": np.array([3, 2**30], np.int32)})) == "graph"
    assert run(choosing(2, params=top_p)) == "graph"  # it belongs to another sequence: all rows of this step are greedy
    assert run(choosing(2, greedy=drawn, params=top_p)) == "sampler"


def test_a_choice_that_is_planned_on_the_host_is_captured_for_greedy_rows_alone(
    monkeypatch: pytest.MonkeyPatch,
):
    plans: list[list[bool]] = []

    def planned(logits: torch.Tensor, arrays: Any, host: Any = None) -> Any:
        plans.append(host.greedy.tolist())
        return late_steps.choose(logits, arrays, host)

    made = steps(2, choice=replace(late_steps.choice(), choose=planned, greedy_only=True))
    run = ways(made, monkeypatch)
    assert plans == [[True, True]] * 2  # the warm-up run and the captured run
    assert run(choosing(2)) == "graph"
    mixed = choosing(2, greedy=np.array([True, False]))
    assert run(mixed) == "sampler"
    made.forward.capture_next()  # pyright: ignore[reportAttributeAccessIssue]
    assert run(mixed) == "graph, sampler"


def test_rows_that_drew_before_leave_nothing_to_those_that_come(monkeypatch: pytest.MonkeyPatch):
    """The sampling arrays are copied with the other inputs; otherwise the tokens differ."""
    fill = CudaGraphRunner._fill
    expected = late_steps.outputs(PROMPTS)
    options: dict[str, Any] = {"sizes": (4,), "capture_every": 1}
    assert late_steps.outputs(PROMPTS, device=LateDevice(Random(0)), **options) == expected
    monkeypatch.setattr(CudaGraphRunner, "_fill", lambda self, given, _: fill(self, given, None))
    assert late_steps.outputs(PROMPTS, device=LateDevice(Random(0)), **options) != expected


# --- attention that is planned on the host ---


@pytest.fixture
def planned(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FlashInfer:
    """Return models whose captured steps attend with fakes of FlashInfer's wrappers for CUDA graphs."""
    kernels, _, latent = getattr(request, "param", "auto").partition(", ")
    backend = FlashInfer(kernels)

    def attend(*step: Any) -> torch.Tensor:
        captured = step[3].replans is not None
        return (backend.attend if captured else late_steps.attend)(*step)

    for name, module in recorded_flashinfer.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(with_flashinfer, "WORKSPACE_BYTES", 16)
    monkeypatch.setattr(with_flashinfer, "check_heads", lambda q: None)
    monkeypatch.setattr(with_flashinfer, "check_latent", lambda q, pool, options: None)
    facts = late_steps.facts("deepseek_v3", kv_lora_rank=512, qk_rope_head_dim=64) if latent else late_steps.facts()
    model = load_model(facts, late_steps.model_plan(), replace(late_steps.kernels(), attend=attend))
    monkeypatch.setattr(late_steps, "model", lambda family: model)
    return backend


@pytest.mark.parametrize("planned", ["auto", "fa3", "auto, latent vectors"], indirect=True)
@pytest.mark.parametrize("haste", [0.0, 0.7])
def test_rows_are_planned_anew_before_each_replay(planned: FlashInfer, haste: float):
    device = LateDevice(Random(1), haste)
    assert late_steps.outputs(PROMPTS, device=device, sizes=(1, 2, 4), capture_every=2) == late_steps.outputs(PROMPTS)
    assert len(planned._fixed) == 3
    assert len({buffers.pages.data_ptr() for _, buffers in planned._fixed.values()}) == 1  # shared by all sizes
    for wrapper, _ in planned._fixed.values():
        assert (wrapper.num_plans if hasattr(wrapper, "num_plans") else wrapper.num_fast_plans) > 1


@pytest.mark.parametrize("lost", ["plan", "wait"])
@pytest.mark.usefixtures("planned")
def test_a_plan_that_is_old_or_comes_too_early_is_noticed(lost: str, monkeypatch: pytest.MonkeyPatch):
    replan = CudaGraphRunner._replan

    def hasty(self: CudaGraphRunner, size: int, *rest: Any) -> None:
        self._planned[size] = reached = LateEvent(self._device)  # pyright: ignore[reportArgumentType]
        reached.reached = True
        replan(self, size, *rest)

    expected = late_steps.outputs(PROMPTS)
    monkeypatch.setattr(CudaGraphRunner, "_replan", hasty if lost == "wait" else lambda *_: None)
    device = LateDevice(Random(1), 0.0)
    assert late_steps.outputs(PROMPTS, device=device, sizes=(4,), depth=2, capture_every=1) != expected


# --- proof that the tests can fail ---


def test_inputs_that_are_bound_anew_instead_of_copied_are_noticed(monkeypatch: pytest.MonkeyPatch):
    def rebind(self: CudaGraphRunner, batch: ForwardBatch, _: Any) -> None:
        self._buffers = batch

    expected = late_steps.outputs(PROMPTS)
    assert late_steps.outputs(PROMPTS, device=LateDevice(Random(0)), sizes=(4,)) == expected
    monkeypatch.setattr(CudaGraphRunner, "_fill", rebind)
    assert late_steps.outputs(PROMPTS, device=LateDevice(Random(0)), sizes=(4,)) != expected


def test_padding_that_keeps_writing_to_pages_of_others_is_noticed(monkeypatch: pytest.MonkeyPatch):
    expected = late_steps.outputs(PROMPTS, num_pages=NUM_PAGES)
    options: dict[str, Any] = {"sizes": (4,), "num_pages": NUM_PAGES, "capture_every": 1}
    assert late_steps.outputs(PROMPTS, device=LateDevice(Random(0)), **options) == expected
    monkeypatch.setattr(CudaGraphRunner, "_reset", lambda self, first: None)
    assert late_steps.outputs(PROMPTS, device=LateDevice(Random(0)), **options) != expected
