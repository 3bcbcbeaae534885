"""Kernels that run one by one or in a graph, and their threads."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import torch

from cpp_kernels import DTYPES, drawn, launcher, library
from ops.attention import AttentionMetadata
from ops.attention.with_cpp import step_in
from ops.cpp.kernel_launcher import LARGE_PAGE, Arena, KernelLauncher, NotCapturable
from ops.cpp.library import Library
from ops.cpp.structures import Step
from ops.kv import with_cpp as kv
from ops.large_pages import BLOCK_BYTES
from ops.norm import with_cpp as norm
from ops.rope import with_cpp as rope

WEIGHT = torch.ones(32)


def os_threads() -> set[str]:
    """Return the ids of this process's threads. Threads of earlier tests may end in the meantime."""
    return set(os.listdir("/proc/self/task"))


def captured(run: KernelLauncher, layers: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor):
    """Return the graph of layers over x, and the tensor that receives its result."""
    results = []
    graph = run.capture(len(x), lambda: results.append(layers(x)))
    return graph, results[0]


def norms(run: KernelLauncher, count: int) -> Callable[[torch.Tensor], torch.Tensor]:
    rms_norm = norm.make(run)["rms_norm"]

    def layers(x: torch.Tensor) -> torch.Tensor:
        for eps in range(count):
            x = rms_norm(x, WEIGHT, 0.1 * eps)
        return x

    return layers


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("num_tokens", [0, 1, 6, 7, 200])
def test_a_graph_computes_what_the_kernels_do_one_by_one(num_threads: int, num_tokens: int) -> None:
    run, x = launcher(num_threads), drawn(max(7, num_tokens), 32)
    layers = norms(run, 5)
    graph, result = captured(run, layers, x)
    result.fill_(-1)
    for _ in range(3):
        graph.run(Step(num_tokens=num_tokens))
        assert torch.equal(result[:num_tokens], layers(x[:num_tokens]))
        assert result[num_tokens:].eq(-1).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_keys_are_rotated_and_stored_at_once_in_a_graph(num_threads: int, dtype: torch.dtype) -> None:
    run, table, positions = launcher(num_threads), drawn(40, 32), torch.arange(37)
    inputs = AttentionMetadata.build([0], [37], np.arange(3, dtype=np.int32)[None, ::-1], 16)
    step_in(inputs).positions = positions.data_ptr()
    rotate, store = rope.make(run)["rotate"], kv.make(run)["store"]

    def outputs(compute: Callable[[Callable[[], None]], object]) -> list[torch.Tensor]:
        q, k, v = drawn(37, 12, 48, dtype=dtype).split((6, 3, 3), dim=1)
        pools = torch.zeros(2, 3, 3, 16, 48, dtype=dtype)

        def layer() -> None:
            turned = rotate(q, k, table, positions)[1]
            store(turned, v, *pools, inputs)

        compute(layer)
        return [q, k, v, pools]

    def in_graph(layer: Callable[[], None]) -> None:
        graph = run.capture(37, layer)
        assert [run.library.name_of(node.kernel) for node in graph.nodes] == ["rotate_store"]
        graph.run(step_in(inputs))

    for found, wanted in zip(outputs(in_graph), outputs(lambda layer: layer()), strict=True):
        assert torch.equal(found, wanted)
        assert found.any()


def test_keys_that_were_not_just_rotated_are_stored_by_themselves() -> None:
    run, table, positions = launcher(1), drawn(40, 32), torch.arange(4)
    inputs = AttentionMetadata.build([0], [4], np.zeros((1, 1), np.int32), 16)
    rotate, store = rope.make(run)["rotate"], kv.make(run)["store"]
    q, k, other = drawn(4, 6, 48).split(2, dim=1)
    pools = torch.zeros(2, 1, 2, 16, 48)

    def layer() -> None:
        rotate(q, k, table, positions)
        store(other, other, *pools, inputs)

    graph = run.capture(4, layer)
    assert [run.library.name_of(node.kernel) for node in graph.nodes] == ["rotate", "store"]


def test_many_layers_need_the_memory_of_one() -> None:
    run, x = launcher(1), drawn(64, 32)
    sizes = [captured(run, norms(run, count), x)[0].nbytes for count in (2, 3, 50)]
    assert sizes[0] == sizes[1] == sizes[2] == 2 * x.nbytes  # input and output


def test_memory_is_used_again_only_when_nobody_holds_a_view_of_it() -> None:
    arena = Arena()
    first = arena.empty((4, 8), torch.float32)
    view = first[2:, 3]
    del first
    assert arena.empty((4, 8), torch.float32).data_ptr() != view.data_ptr() - 19 * 4
    address = view.data_ptr() - 19 * 4
    del view
    assert arena.empty((4, 8), torch.float32).data_ptr() == address
    assert arena.nbytes == 2 * 4 * 8 * 4
    assert arena.empty((100, 8), torch.bfloat16).data_ptr() % 64 == 0
    assert arena.empty((LARGE_PAGE + 1,), torch.uint8).data_ptr() % LARGE_PAGE == 0


def test_weights_begin_at_cache_lines_and_share_nothing() -> None:
    kernels = launcher()
    sizes = (100, 1, BLOCK_BYTES - 64, 64, 0)
    weights = [kernels.weight_memory(size) for size in sizes]
    for number, weight in enumerate(weights):
        assert not weight[-1000:].any()
        weight.fill_(number + 1)
    for number, (weight, size) in enumerate(zip(weights, sizes)):
        assert weight.untyped_storage().nbytes() == size
        assert weight.untyped_storage().data_ptr() % 64 == 0
        assert (weight == number + 1).all()
    assert weights[1].data_ptr() - weights[0].data_ptr() == 128


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: x + 1,
        lambda x: x.mul_(2),
        lambda x: torch.empty(3),
        lambda x: x.t().contiguous(),
        lambda x: x.sum().item(),
        lambda x: x[0, 0].item(),
        lambda x: torch.equal(x, x),
        lambda x: bool(x[0, 0]),
    ],
    ids=["sum", "in place", "new", "copy", "number of a sum", "number", "equal", "truth"],
)
def test_what_torch_computes_cannot_be_captured(compute) -> None:
    run, x = launcher(1), drawn(4, 4)
    with pytest.raises(NotCapturable, match="computed by torch"):
        run.capture(4, lambda: compute(x))
    assert run.empty((2,), torch.float32).shape == (2,)  # the launcher is no longer capturing
    assert torch.equal(norm.make(run)["rms_norm"](x, WEIGHT[:4], 1.0), norms_of(x))


def norms_of(x: torch.Tensor) -> torch.Tensor:
    return norm.make(launcher(2))["rms_norm"](x, WEIGHT[:4], 1.0)


def test_views_can_be_captured() -> None:
    run, x = launcher(1), drawn(4, 8)
    run.capture(4, lambda: x.view(4, 2, 4).transpose(0, 1).split(2)[0][:, 1:].detach())


def test_something_else_than_the_tokens_of_the_step_cannot_be_captured() -> None:
    run, x = launcher(1), drawn(4, 32)
    with pytest.raises(NotCapturable, match="one row per token"):
        run.capture(4, lambda: norm.make(run)["rms_norm"](x[:2], WEIGHT, 1e-5))


def test_positions_that_are_not_the_steps_own_cannot_be_captured() -> None:
    run, table, positions = launcher(1), drawn(40, 32), torch.arange(4)
    q, k = drawn(4, 6, 48).split(3, dim=1)
    step = Step(num_tokens=4, positions=positions.data_ptr())

    def turn(positions: torch.Tensor) -> object:
        return rope.make(run)["rotate"](q, k, table, positions)

    run.capture(4, lambda: turn(positions), step)
    other = positions + 1
    with pytest.raises(NotCapturable, match="positions from another buffer"):
        run.capture(4, lambda: turn(other), step)


def test_a_graph_takes_no_more_tokens_than_it_has_room_for() -> None:
    run = launcher(1)
    graph, _ = captured(run, norms(run, 1), drawn(4, 32))
    with pytest.raises(ValueError, match="has 5 tokens, but"):
        graph.run(Step(num_tokens=5))


def test_graphs_run_one_after_the_other_in_one_call() -> None:
    run, x = launcher(2), drawn(4, 32)
    first, half = captured(run, norms(run, 1), x)
    second, result = captured(run, norms(run, 2), half)
    both = first.followed_by(second)
    assert both.nbytes == first.nbytes + second.nbytes
    del first, second
    both.run(Step(num_tokens=4))
    assert torch.equal(result, norms(run, 2)(norms(run, 1)(x)))


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_graph_of_nothing_runs(num_threads: int) -> None:
    run, x = launcher(num_threads), drawn(5, 32)
    empty = run.capture(4, lambda: None)
    wanted = norms(run, 1)(x)
    for _ in range(200):
        empty.run(Step(num_tokens=1))
        assert torch.equal(norms(run, 1)(x), wanted)


def test_closing_ends_the_threads_at_once_and_twice_is_once() -> None:
    before = os_threads()
    run = KernelLauncher(library(), 4)
    assert len(os_threads() - before) == 3
    run.close()
    run.close()
    assert not os_threads() - before


def test_threads_end_with_their_kernel_launcher() -> None:
    before = os_threads()
    run = KernelLauncher(library(), 3)
    norms(run, 1)(drawn(2, 32))
    del run
    gc.collect()
    assert not os_threads() - before


def test_after_closing_nothing_runs() -> None:
    run, x = launcher(2), drawn(4, 32)
    graph, _ = captured(run, norms(run, 1), x)
    run.close()
    with pytest.raises(RuntimeError, match="is closed"):
        norms(run, 1)(x)
    with pytest.raises(RuntimeError, match="is closed"):
        graph.run(Step(num_tokens=1))


class SlowLibrary:
    """A library whose kernels run until they are told to end. Records the order of events."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.runs, self.ends = threading.Event(), threading.Event()

    def open_pool(self, num_threads: int) -> int:
        return 1

    def run(self, pool: int, nodes: int, count: int, step: int) -> None:
        self.runs.set()
        self.ends.wait()
        self.events.append("run")

    def close_pool(self, pool: int) -> None:
        self.events.append("closed")


def test_threads_do_not_end_while_they_run_kernels() -> None:
    slow = SlowLibrary()
    run = KernelLauncher(cast(Library, slow), 2)
    running = threading.Thread(target=run.run, args=(0, 1, Step()))
    closing = threading.Thread(target=run.close)
    running.start()
    assert slow.runs.wait(10)
    closing.start()
    closing.join(0.05)
    assert slow.events == []
    slow.ends.set()
    closing.join(10)
    running.join(10)
    assert slow.events == ["run", "closed"]
    with pytest.raises(RuntimeError, match="is closed"):
        run.run(0, 1, Step())


def test_an_unknown_dtype_is_an_error_not_a_wrong_result() -> None:
    with pytest.raises(KeyError):
        norm.make(launcher(1))["rms_norm"](drawn(2, 32).half(), WEIGHT.half(), 1e-5)
