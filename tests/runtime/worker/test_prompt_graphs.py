"""Steps with prompts in graphs: the parts between two attention calls are captured for fixed numbers of tokens."""

from __future__ import annotations

import logging
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import fake_device
import late_steps
from fake_device import LateDevice
from late_steps import batch, replays
from runtime.config.resolve.graph_sizes import Buckets
from runtime.layers.forward_batch import ForwardBatch
from runtime.worker import prompt_graphs
from runtime.worker.prompt_graphs import PromptGraphs

PROMPTS = [([3 + i, 9, 4 + 3 * i, 7, 5 + i, 11, 2 + i][: 2 + i % 6], 3 + 2 * (i * 7 % 5)) for i in range(9)]
SIZES = (5, 9, 16)


def outputs(family: str = "qwen3", seed: int | None = 0, depth: int = 1, **options: Any) -> list[list[int]]:
    """Return the tokens of steps with graphs. A graph is captured after every step. `seed=None` uses no graphs."""
    device = None if seed is None else LateDevice(Random(seed))
    graphs = {} if device is None else {"sizes": (1, 2, 4), "prompt_sizes": SIZES, "capture_every": 1}
    return late_steps.outputs(PROMPTS, family=family, device=device, depth=depth, **graphs, **options)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that gets, for each replay, its size and the number of tokens of the step."""
    found: list[tuple[int, int]] = []
    call = PromptGraphs.__call__

    def counted(self: PromptGraphs, step: ForwardBatch) -> Tensor | None:
        hidden = call(self, step)
        if hidden is not None:
            found.append((self._buckets.take(step.num_tokens) or 0, step.num_tokens))
        return hidden

    monkeypatch.setattr(PromptGraphs, "__call__", counted)
    return found


@pytest.mark.parametrize(
    "family",
    [
        "qwen3",
        "deepseek_v2",  # latent attention and experts
        "lfm2",  # short convolutions
        pytest.param("qwen3_next", marks=pytest.mark.slow),  # gated delta nets and experts
        pytest.param("granitemoehybrid", marks=pytest.mark.slow),  # Mamba 2
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
        pytest.param("gemma2", marks=pytest.mark.slow),
        pytest.param("gpt_neox", marks=pytest.mark.slow),  # attention and MLP side by side
    ],
)
def test_graphs_give_the_tokens_of_eager_steps(family: str, replayed: list[tuple[int, int]]) -> None:
    expected = outputs(family, seed=None)
    for seed, depth in ((0, 1), (1, 2)):
        assert outputs(family, seed, depth) == expected
    assert len({size for size, _ in replayed}) > 1
    assert any(count < size for size, count in replayed)  # with padding
    assert any(count == size for size, count in replayed)


def test_only_sizes_that_steps_need_are_captured_and_the_last_one_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made = late_steps.Steps(12, 4, LateDevice(Random(0)))
    graphs: Any = made.use_graphs(Buckets((1,)), (4, 8, 12), choice=None)
    while graphs.capture_next():
        pass
    assert not graphs.is_waiting()
    run = replays(monkeypatch, made)
    assert not run(batch(1, count=8))
    assert not run(batch(2, count=2))
    assert not run(batch(1, count=20))  # larger than any size
    assert not run(batch(2))  # more decode rows than the largest decode graph has
    assert graphs.num_missed() == 3
    graphs.capture_next()
    assert graphs._prompts.captured == {4}
    graphs.capture_next()
    assert graphs._prompts.captured == {4, 8}
    assert not graphs.is_waiting()
    assert all(run(each) for each in (batch(1, count=8), batch(1, count=3), batch(2), batch(3, count=2)))


def test_a_failed_capture_leaves_decode_graphs_and_eager_prompts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = late_steps.Steps(12, 4, LateDevice(Random(0)))
    graphs: Any = made.use_graphs(Buckets((1, 2)), (4,), choice=None)
    run = replays(monkeypatch, made)
    assert not run(batch(1, count=4))

    def fail(*_: Any) -> Any:
        raise RuntimeError("no such kernel")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "penstock.core"):
        patch.setattr(LateDevice, "capture_parts", fail)
        assert graphs.capture_next()
    assert "could not be captured" in caplog.text
    while graphs.capture_next():
        pass
    assert graphs.captured == {1, 2}
    assert run(batch(2))
    assert not run(batch(1, count=4))


def test_a_capture_writes_to_no_page_but_the_scratch_page() -> None:
    made = late_steps.Steps(12, 4, LateDevice(Random(0)))
    graphs: Any = made.use_graphs(Buckets((1,)), (4,), choice=None)
    made.launch(batch(1, start=0, count=3))
    made.finish_oldest()
    made.device.settle()  # pyright: ignore[reportAttributeAccessIssue]
    before = [layer.k[:-1].clone() for layer in made.pool.values()]
    while graphs.capture_next():
        pass
    made.device.settle()  # pyright: ignore[reportAttributeAccessIssue]
    assert all(torch.equal(layer.k[:-1], kept) for layer, kept in zip(made.pool.values(), before, strict=True))


def test_a_padded_step_clears_the_buffer_that_all_layers_share_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = late_steps.Steps(12, 4, LateDevice(Random(0)))
    graphs: Any = made.use_graphs(Buckets((1,)), (4,), choice=None)
    run = replays(monkeypatch, made)
    run(batch(1, count=3))
    while graphs.capture_next():
        pass
    [out] = [buffer for (name, *_), buffer in graphs._prompts._between.items() if name == prompt_graphs.OUT]
    cleared: list[int] = []
    change = fake_device._Noting._note_change

    def noted(self: Any, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten.zero_.default and args[0].data_ptr() - out.data_ptr() in range(out.nbytes):
            cleared.append(len(args[0]))
        return change(self, func, args, kwargs)

    monkeypatch.setattr(fake_device._Noting, "_note_change", noted)
    assert run(batch(1, count=3))
    assert len(made.pool) > 1
    assert cleared == [1]


@pytest.mark.parametrize("lost", ["slots", "pad", "rows"])
def test_a_mistake_in_a_replay_is_noticed(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistakes: cache slots of the last step stay, padding keeps old slots, attention gets the captured rows."""
    expected = outputs(seed=None)
    if lost == "slots":
        fill = PromptGraphs._fill

        def kept(self: PromptGraphs, step: ForwardBatch) -> None:
            inputs = self._inputs
            self._inputs = inputs[1:]
            fill(self, step)
            self._inputs = inputs

        monkeypatch.setattr(PromptGraphs, "_fill", kept)
    elif lost == "pad":
        monkeypatch.setattr(PromptGraphs, "_pad", lambda self, num_tokens: None)
    else:
        call = prompt_graphs._Call

        def frozen(inputs: Any, out: Tensor, attend: Any) -> Any:
            first: list[ForwardBatch] = []

            def of_the_first(parts: Any, step: ForwardBatch) -> Tensor:
                first.append(step)
                count = first[0].num_tokens
                found = attend([each[:1].expand(count, *each.shape[1:]) for each in parts], first[0])
                return found[:1].expand(len(parts[0]), *found.shape[1:])

            return call(inputs, out, of_the_first)

        monkeypatch.setattr(prompt_graphs, "_Call", frozen)
    assert outputs() != expected


def test_steps_with_what_graphs_do_not_read_run_eagerly() -> None:
    made = late_steps.Steps(12, 4, LateDevice(Random(0)))
    graphs = PromptGraphs(made.forward, made.pool, made.device, Buckets((4,)), reads=late_steps.NOTHING_MORE)
    seen: list[ForwardBatch] = []
    made.use_forward(lambda step: seen.append(step) or late_steps.model()(step))
    made.launch(batch(1, count=4))
    made.finish_oldest()
    [step] = seen
    for changes in ({"media_levels": [step.positions]}, {"adapted": {0: step.positions}}, {"states": step.positions}):
        assert graphs(replace(step, **changes)) is None
    again = replace(step.attention, repeated=(step.positions, step.attention))
    assert graphs(replace(step, attention=again)) is None
    assert not graphs.is_waiting()
    assert graphs(step) is None
    assert graphs.is_waiting()
