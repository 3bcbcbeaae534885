"""The halves of a step, and the turns of the threads that compute them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ops.attention import AttentionMetadata
from runtime.layers.forward_batch import ForwardBatch
from runtime.mesh.turns import Turns
from runtime.worker.two_batches import halves, split_point


def step(*rows: tuple[int, int]) -> ForwardBatch:
    """Return a step of rows (start, count) with pages of 4 tokens, and a page table of its own for each row."""
    starts, counts = [start for start, _ in rows], [count for _, count in rows]
    pages = np.arange(len(rows) * 8, dtype=np.int32).reshape(len(rows), 8)
    attention = AttentionMetadata.build(starts, counts, pages, 4)
    positions = torch.cat([torch.arange(start, start + count) for start, count in rows])
    return ForwardBatch(token_ids=torch.arange(sum(counts)), positions=positions, attention=attention, cache={})


@pytest.mark.parametrize(
    ("rows", "threshold", "at"),
    [
        ([(3, 1)], 0.48, 0),  # one token
        ([(3, 1), (9, 1)], 0.48, 1),
        ([(3, 1)] * 5, 0.48, 2),  # 2 of 5 are less than 0.48, but so is the middle
        ([(0, 10)], 0.48, 5),  # a row is divided
        ([(0, 10)], 0.0, 0),
        ([(0, 3), (0, 9)], 0.48, 6),
        ([(0, 3), (0, 9)], 0.2, 3),
    ],
)
def test_steps_are_cut_between_rows_if_the_halves_are_even(rows: Any, threshold: float, at: int) -> None:
    assert split_point(step(*rows), threshold) == at


def test_steps_with_other_inputs_stay_whole() -> None:
    whole = step((0, 4), (0, 4))
    assert split_point(whole, 0.48) == 4
    assert split_point(replace(whole, group_tokens=(8, 0)), 0.48) == 0
    assert split_point(replace(whole, row_values={"adapter": torch.zeros(2)}), 0.48) == 0
    assert split_point(replace(whole, attention=replace(whole.attention, mutual_spans=[(0, 1, 2)])), 0.48) == 0


@pytest.mark.parametrize("at", range(1, 12))
def test_halves_are_the_step_wherever_it_is_cut(at: int) -> None:
    rows = [(2, 5), (7, 1), (0, 6)]
    whole = step(*rows)
    tokens: list[tuple[int, int]] = []
    for half in halves(whole, at):
        data = half.attention
        expected = AttentionMetadata.build(data.starts_host, data.counts_host, data.page_table.numpy(), 4)
        for name in ("starts", "counts", "query_starts", "slot_mapping"):
            assert torch.equal(getattr(data, name), getattr(expected, name)), name
        tokens += zip(half.positions.tolist(), data.slot_mapping.tolist(), strict=True)
        assert half.num_tokens == sum(data.counts_host)
    assert tokens == [*zip(whole.positions.tolist(), whole.attention.slot_mapping.tolist(), strict=True)]


class Work:
    """A collective that ends at once, and notes when a thread waits for it."""

    def __init__(self, waited: list[tuple[int, int]], number: int, each: int) -> None:
        self._waited, self._id = waited, (number, each)

    def wait(self) -> None:
        self._waited.append(self._id)


@pytest.mark.parametrize("counts", [(3, 3), (1, 4), (4, 1), (0, 2), (2, 0)])
def test_threads_begin_their_collectives_in_one_order(counts: tuple[int, int]) -> None:
    turns, begun = Turns(), []

    def run(number: int) -> None:
        turns.enter(number)
        for each in range(counts[number]):
            begun.append((number, each))
            turns.wait(Work([], number, each))
        turns.leave(number)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run, number) for number in (1, 0)]:
            done.result(timeout=30)
    both = min(counts)
    in_turns = [(number, each) for each in range(both) for number in (0, 1)]
    assert begun[: 2 * both] == in_turns
    assert len(begun) == sum(counts)


def test_a_thread_waits_for_its_collective_only_when_it_has_the_turn_again() -> None:
    """The threads share a stream: if a wait came first, it would hold up the work of the other thread."""
    turns, log = Turns(), list[tuple[int, int]]()

    def run(number: int) -> None:
        turns.enter(number)
        for each in range(2):
            log.append((number, each))
            turns.wait(Work(log, number, each))
        turns.leave(number)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(run, number) for number in (1, 0)]:
            done.result(timeout=30)
    assert log == [(0, 0), (1, 0), (0, 0), (0, 1), (1, 0), (1, 1), (0, 1), (1, 1)]
