"""The likeliest tokens: of equal logits the lowest id, whichever thread computes which part of the vocabulary."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from cpp_kernels import DTYPES, LESSER, drawn, launcher
from kernel_cases.sampling import rows
from ops import captured_step
from ops.cpp.kernel_launcher import KernelLauncher
from ops.cpp.structures import Step
from ops.matmul import with_cpp as matmul
from ops.sampling import native

VOCAB_SIZE, SIZE, REPEATS = 8200, 64, 100
THREADS = (1, 2, 3, 5)
KERNELS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "8 bits of float32": (torch.float32, 8),
    "8 bits of bfloat16": (torch.bfloat16, 8),
}


def head_with_equal_rows(run: KernelLauncher, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [R, E], a head's weight [V, E], and the lowest ids of the largest logits [R].

    One lane of the vectors holds all the equal logits of a row, from some id on: a thread that takes the panel of
    the lowest id from another, at the end of that one's part, has seen higher ids before.
    """
    width = run.library.panel_width
    num_panels = -(-VOCAB_SIZE // width)
    ends = [num_panels * part // parts for parts in THREADS for part in range(1, parts)]
    panels = [end - back for end in ends for back in (1, 2)]
    hidden = drawn(len(panels), SIZE, dtype=dtype)
    weight = 0.05 * drawn(VOCAB_SIZE, SIZE, dtype=dtype)
    firsts = [panel * width + 2 * row for row, panel in enumerate(panels)]
    for row, first in enumerate(firsts):
        weight[first::width] = hidden[row]
    return hidden, weight, torch.tensor(firsts)


@contextmanager
def load() -> Iterator[None]:
    """Threads that compute something else at the same time."""
    ended = threading.Event()

    def compute() -> None:
        x = np.ones((200, 200))
        while not ended.is_set():
            _ = x @ x

    threads = [threading.Thread(target=compute) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def likeliest(run: KernelLauncher, hidden: Tensor, weight: Tensor) -> Iterator[Tensor]:
    """The ids of the largest logits [R], computed again and again."""
    results: list[tuple[Tensor, Tensor]] = []
    graph = run.capture(len(hidden), lambda: results.append(captured_step.choose_greedy(run, hidden, weight)))
    ids, sound = results[0]
    rows, last_tokens = np.arange(len(hidden), dtype=np.int32), torch.zeros(len(hidden), dtype=torch.int64)
    address = rows.ctypes.data
    step = Step(
        num_tokens=len(rows),
        num_rows=len(rows),
        num_samples=len(rows),
        sample_sequences=address,
    )
    step.last_tokens = last_tokens.data_ptr()
    while True:
        graph.run(step)
        assert sound.all()
        assert torch.equal(ids, last_tokens)
        yield ids


def chosen_by_torch(run: KernelLauncher, hidden: Tensor, weight: Tensor) -> Tensor:
    logits = matmul.make(run)["logits"](hidden, weight)
    return native.choose(logits, rows(len(hidden), greedy=True))[0]


def is_always_the_lowest(run: KernelLauncher, kernel: str) -> None:
    dtype, weight_bits = KERNELS[kernel]
    hidden, plain, firsts = head_with_equal_rows(run, dtype)
    bits = {} if weight_bits is None else {"bits": weight_bits}
    weight = matmul.make(run)["prepare"](plain, **bits)
    assert torch.equal(chosen_by_torch(run, hidden, weight), firsts)
    for _, ids in zip(range(REPEATS), likeliest(run, hidden, weight)):
        assert torch.equal(ids, firsts)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("num_threads", THREADS)
def test_of_equal_logits_the_lowest_id_is_chosen(num_threads: int, kernel: str) -> None:
    with load():
        is_always_the_lowest(launcher(num_threads), kernel)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("normalized", [True, False])
def test_texts_are_pooled_as_torch_pools_them(dtype: torch.dtype, mean: bool, normalized: bool) -> None:
    counts, size = np.array([1, 7, 40, 2], np.int32), 40
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    hidden, found = drawn(int(starts[-1]), size, dtype=dtype), torch.empty(len(counts), size)
    run = launcher(2)
    step = Step(
        num_tokens=len(hidden),
        num_rows=len(counts),
        counts=counts.ctypes.data,
        query_starts=starts.ctypes.data,
    )
    graph = run.capture(
        len(hidden),
        lambda: captured_step.pool_rows(run, hidden, found, mean=mean, normalized=normalized),
    )
    graph.run(step)
    texts = [text.float() for text in hidden.split(counts.tolist())]
    expected = torch.stack([text.mean(0) if mean else text[0] for text in texts])
    if normalized:
        expected = torch.nn.functional.normalize(expected, dim=-1)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("processor", LESSER)
def test_of_equal_logits_lesser_processors_choose_the_lowest_id(processor: str, kernel: str) -> None:
    with load():
        is_always_the_lowest(launcher(3, *LESSER[processor]), kernel)
