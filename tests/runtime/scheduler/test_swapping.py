"""A retracted sequence gets its pages back from host memory, and no token of it is computed twice."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from fake_runner import Drive, make_plan, make_sequence
from late_host_data import LateHostData
from runtime.batch import Batch, PageCopy
from runtime.kv_cache.copy_queue import CopyQueue
from runtime.kv_cache.host_pool import HostPool
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.kv_cache.states import StateKind
from runtime.request import Finish
from runtime.scheduler import budget
from runtime.sequence import Sequence


@pytest.fixture(autouse=True)
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Return a plan whose admission reserves almost nothing, so that sequences are retracted."""
    monkeypatch.setattr(budget, "RESERVED_OUTPUT_TOKENS", 1)


def tight(num_host_pages: int, *, num_pages: int = 14, page_size: int = 1, **options: object) -> Drive:
    plan = make_plan(new_token_ratio=0.0, min_new_token_ratio=0.0)
    options = {"depth": 1, "prefix": False} | options
    return Drive(plan, num_pages=num_pages, page_size=page_size, num_host_pages=num_host_pages, **options)  # type: ignore[arg-type]


def crowd(*shapes: tuple[int, int]) -> list[Sequence]:
    """Return sequences with these lengths of prompt and output."""
    return [make_sequence([i] * n, max_new_tokens=m, seed=i) for i, (n, m) in enumerate(shapes)]


def held(drive: Drive) -> HostPool:
    assert drive.cache.host is not None
    return drive.cache.host


def until_swapped(drive: Drive) -> None:
    while not held(drive).num_used:
        assert drive.step() is not None


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("page_size", [1, 4])
def test_nothing_but_tokens_under_way_is_computed_again(page_size: int, depth: int, prefix: bool):
    loads = []
    for num_host_pages in (0, 100):
        drive = tight(num_host_pages, num_pages=40 // page_size, page_size=page_size, depth=depth, prefix=prefix)
        sequences = crowd((4, 20), (4, 20), (4, 20), (4, 20))
        drive.add(*sequences)
        drive.run()
        assert [drive.output(s) for s in sequences] == [drive.expected(s) for s in sequences]
        loads.append(drive.scheduler.load)
    without, with_host = loads
    assert without.num_retracted > 0
    assert with_host.num_retracted > 0
    assert (without.num_swapped_out, without.num_swapped_in) == (0, 0)
    assert with_host.num_swapped_out >= with_host.num_swapped_in > 0
    assert with_host.num_recomputed <= depth * with_host.num_retracted
    assert without.num_recomputed > with_host.num_recomputed


def test_a_full_host_pool_leaves_recomputation():
    drive = tight(3)
    sequences = crowd((5, 9), (2, 9))
    drive.add(*sequences)
    drive.run()
    load = drive.scheduler.load
    assert load.num_retracted > 0
    assert load.num_swapped_out == 0
    assert load.num_recomputed > 0
    assert [drive.output(s) for s in sequences] == [drive.expected(s) for s in sequences]


def test_what_the_tree_still_has_is_not_copied_back():
    drive = tight(100, num_pages=30, prefix=True, depth=0)
    sequences = [make_sequence([*([7] * 12), i], max_new_tokens=12, seed=i) for i in range(3)]
    drive.add(*sequences)
    until_swapped(drive)
    num_copied = held(drive).num_used
    assert num_copied > 12
    while held(drive).num_used:
        drive.step()
    assert 0 < held(drive).num_swapped_in < num_copied
    drive.run()
    assert [drive.output(s) for s in sequences] == [drive.expected(s) for s in sequences]


def test_a_sequence_goes_on_whatever_became_of_the_tree():
    drive = tight(100, num_pages=30, prefix=True, depth=0)
    sequences = [make_sequence([*([7] * 12), i], max_new_tokens=12, seed=i) for i in range(3)]
    drive.add(*sequences)
    until_swapped(drive)
    (victim,) = held(drive).holders
    num_copied = held(drive).num_used
    others = [sequence for sequence in sequences if sequence is not victim]
    drive.scheduler.abort(others, Finish("abort"))
    drive.cache.empty()
    drive.run()
    assert drive.scheduler.load.num_swapped_in == num_copied
    assert drive.scheduler.load.num_recomputed == 0
    assert drive.output(victim) == drive.expected(victim)


def test_an_aborted_sequence_leaves_host_memory():
    drive = tight(100)
    drive.add(*crowd((5, 9), (2, 9)))
    until_swapped(drive)
    drive.scheduler.abort(list(held(drive).holders), Finish("abort"))
    drive.scheduler.check()
    assert held(drive).num_used == 0
    drive.run()


@pytest.mark.parametrize("how", ["fail", "give_up_newest", "rebuild"])
def test_recovery_trusts_nothing_in_host_memory(how: str):
    drive = tight(100)
    sequences = crowd((5, 9), (2, 9))
    drive.add(*sequences)
    until_swapped(drive)
    batches = drive.runner.drop()
    if how == "rebuild":
        drive.scheduler.rebuild()
    else:
        getattr(drive.scheduler, how)(batches)
    drive.scheduler.check()
    assert held(drive).num_used == 0
    assert not drive.cache.copies
    drive.run()
    left = [sequence for sequence in sequences if sequence.finish is None or sequence.finish.kind != "abort"]
    assert left
    assert [drive.output(s) for s in left] == [drive.expected(s) for s in left]


def test_pages_return_where_masks_come_late():
    """A retracted sequence may lose a pending token whose mask did not arrive."""
    late = LateHostData(50, is_held=lambda output_ids: len(output_ids) % 3 == 1)
    drive = tight(100, num_pages=24, depth=1)
    sequences = [make_sequence([i] * 4, max_new_tokens=14, seed=i, constraint=late) for i in range(3)]
    drive.add(*sequences)
    for _ in range(400):
        drive.step()
        if late.num_held:
            late.deliver(0)
    assert drive.scheduler.load.num_swapped_in > 0
    assert [drive.output(s) for s in sequences] == [drive.expected(s) for s in sequences]


@pytest.mark.parametrize("seed", range(20))
def test_nothing_leaks_where_sequences_leave_at_random(seed: int):
    random = Random(seed)
    page_size = random.choice([1, 4])
    drive = tight(
        random.choice([4, 12, 100]),
        num_pages=48 // page_size,
        page_size=page_size,
        prefix=random.random() < 0.5,
        depth=random.choice([0, 1, 2]),
    )
    alive: list[Sequence] = []
    ended: set[Sequence] = set()
    for number in range(60):
        if random.random() < 0.4:
            alive.append(make_sequence([number % 3] * random.randint(1, 9), max_new_tokens=18, seed=number))
            drive.add(alive[-1])
        if alive and random.random() < 0.2:
            sequence = random.choice(alive)
            if sequence.finish is None:
                ended.add(sequence)
            drive.scheduler.abort([sequence], Finish("abort"))
            drive.scheduler.check()
        drive.step()
    drive.run()
    for sequence in alive:
        if sequence not in ended:
            assert drive.output(sequence) == drive.expected(sequence)
    assert held(drive).num_used == 0
    assert drive.scheduler.flush()
    assert drive.cache.num_free == drive.cache.num_pages


def test_batches_without_a_host_pool_carry_no_copies():
    seen: list[Batch] = []
    drive = tight(0, watch=seen.append)
    drive.add(*crowd((5, 9), (2, 9)))
    drive.run()
    assert drive.scheduler.num_retracted > 0
    assert all(batch.copies == () for batch in seen)


def test_wrong_page_that_is_copied_is_noticed(monkeypatch: pytest.MonkeyPatch):
    take = CopyQueue.take

    def shifted(copy: PageCopy) -> PageCopy:
        return copy if copy.target == "device" else copy._replace(source_pages=np.roll(copy.source_pages, 1))

    monkeypatch.setattr(CopyQueue, "take", lambda self: tuple(map(shifted, take(self))))
    drive = tight(100)
    drive.add(*crowd((5, 9), (2, 9)))
    with pytest.raises(AssertionError, match="another history"):
        drive.run()


def test_other_caches_cannot_be_swapped_out():
    with pytest.raises(ValueError, match="cannot be copied to the host"):
        PrefixCache(8, 4, kinds=[StateKind({}, 5, 8, 4)], num_host_pages=4)


def test_check_finds_host_pages_of_sequences_that_do_not_wait():
    drive = tight(100)
    drive.add(*crowd((5, 9), (2, 9)))
    until_swapped(drive)
    (victim,) = held(drive).holders
    drive.scheduler._waiting.remove(victim)
    with pytest.raises(ValueError, match="does not wait"):
        drive.scheduler.check()
