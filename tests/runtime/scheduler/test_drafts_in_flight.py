"""A sequence with drafts in flight continues in the next step, from a position that only the device knows."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from fake_runner import Drive, FakeRunner, make_plan, make_sequence
from runtime.batch import Batch
from runtime.request import Finish
from runtime.sequence import Sequence
from scripted_drafts import script_drafts

VOCAB = 50
FOLLOWED: dict[int, int] = {}  # seed of a random run -> number of rows that followed drafts


class Watched:
    """A drive that records its batches, and whose greedy sequences have scripted drafts."""

    def __init__(self, *, page_size: int = 4, num_pages: int = 256, vocab_size: int = VOCAB, **changes: Any) -> None:
        self.batches: list[Batch] = []
        self._vocab_size = vocab_size
        plan = make_plan(**({"max_drafts": 8, "overlap_drafts": True} | changes.pop("plan", {})))
        self.drive = Drive(
            plan,
            page_size=page_size,
            num_pages=num_pages,
            vocab_size=vocab_size,
            watch=self.batches.append,
            **changes,
        )

    def add(self, *sequences: Sequence, drafts: int = 8) -> None:
        self.drive.add(*sequences)
        script_drafts(self.drive.scheduler, self.drive.expected, self._vocab_size, drafts)

    @property
    def followers(self) -> list[list[Sequence]]:
        """Return the sequences of each batch whose start the batch does not know."""
        return [
            []
            if batch.unknown_starts is None
            else [sequence for sequence, unknown in zip(batch.sequences, batch.unknown_starts, strict=True) if unknown]
            for batch in self.batches
        ]

    def run(self) -> None:
        self.drive.run()

    def check(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            assert self.drive.output(sequence) == self.drive.expected(sequence)


def greedy(first: int, *, vocab_size: int = VOCAB, **values: Any) -> Sequence:
    values = {"max_new_tokens": 60, "temperature": 0.0} | values
    return make_sequence([token % vocab_size for token in range(first, first + 5)], **values)


def plain(first: int, **values: Any) -> Sequence:
    """Return a sequence that never has drafts."""
    values = {"speculative": False} | values
    return greedy(first, **values)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_are_exact_and_rows_follow_drafts(page_size: int, depth: int):
    watched = Watched(page_size=page_size, num_pages=1024 // page_size, depth=depth)
    sequences = [greedy(1), plain(11), greedy(21), plain(31, max_new_tokens=90)]
    watched.add(*sequences)
    watched.run()
    watched.check(*sequences)
    assert sum(map(len, watched.followers)) > 10
    assert {sequence for row in watched.followers for sequence in row} == {sequences[0], sequences[2]}


def test_without_other_rows_a_sequence_waits_for_its_drafts():
    watched = Watched()
    sequences = [greedy(1), greedy(21)]
    watched.add(*sequences)
    watched.run()
    watched.check(*sequences)
    for batch, followers in zip(watched.batches, watched.followers, strict=True):
        assert len(followers) < len(batch.sequences)


def test_rows_that_draw_by_their_position_wait():
    watched = Watched()
    drawn, other = greedy(1, temperature=1.0), plain(11)
    watched.add(drawn, other)
    watched.run()
    watched.check(drawn, other)
    assert drawn.draft_counts
    assert not any(watched.followers)


@pytest.mark.parametrize("overlaps", [False, True], ids=["exact", "unknown"])
def test_rows_follow_unless_exact_lengths_are_wanted(overlaps: bool):
    watched = Watched(num_states=40, plan={"max_drafts": 3, "overlap_drafts": overlaps})
    sequences = [greedy(1), plain(11)]
    watched.add(*sequences, drafts=3)
    watched.run()
    watched.check(*sequences)
    assert sequences[0].draft_counts
    assert any(watched.followers) == overlaps


def in_flight(**changes: Any) -> tuple[Watched, Sequence, Sequence]:
    """Return a drive in which the first sequence has drafts in flight, and a row after them."""
    watched = Watched(**changes)
    sequence, other = greedy(1), plain(11)
    watched.add(sequence, other)
    drive = watched.drive
    for _ in range(100):
        batch = drive.scheduler.fill()
        drive.scheduler.check()
        if batch is not None:
            watched.batches.append(batch)
            drive.runner.launch(batch)
            if watched.followers[-1]:
                return watched, sequence, other
        if drive.runner.num_in_flight > 1 or batch is None:
            drive.apply()
    raise AssertionError("no row followed drafts")


def test_a_row_after_drafts_leaves_exact_counts():
    watched, sequence, _ = in_flight(depth=3)
    assert sequence.num_drafted
    bound, num_drafted = sequence.num_computed, sequence.num_drafted
    while sequence.num_drafted:
        watched.drive.apply()
    assert sequence.num_pending == 1
    assert sequence.num_computed == len(sequence.ids)
    assert bound - num_drafted <= sequence.num_computed <= bound


def test_a_bound_instead_of_the_length_is_noticed(monkeypatch: pytest.MonkeyPatch):
    def with_bounds(runner: FakeRunner, batch: Batch) -> Batch:
        return replace(batch, unknown_starts=None)

    monkeypatch.setattr(FakeRunner, "_with_exact_starts", with_bounds)
    watched = Watched()
    sequences = [greedy(1), greedy(21), greedy(31), plain(11)]
    watched.add(*sequences)

    def run() -> None:
        watched.run()
        watched.check(*sequences)

    with pytest.raises(AssertionError):
        run()


@pytest.mark.parametrize("how", ["abort", "retract", "fail", "rebuild"])
def test_pages_balance_when_a_sequence_leaves_with_two_rows_in_flight(how: str):
    watched, sequence, other = in_flight()
    scheduler = watched.drive.scheduler
    if how == "abort":
        scheduler.abort([sequence], Finish("abort", message="gone"))
    elif how == "retract":
        scheduler._builder.retraction.retract(sequence)
    elif how == "fail":
        scheduler.fail(watched.drive.runner.drop())
    else:
        watched.drive.runner.drop()
        scheduler.rebuild()
    scheduler.check()
    watched.run()
    watched.check(*([other] if how == "abort" else [sequence, other]))
    assert watched.drive.cache.num_used == 0


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_outputs_are_exact_and_pages_balance(seed: int):
    random = Random(seed)
    page_size = random.choice([1, 2, 4])
    window = random.choice([None, None, 3, 9])
    watched = Watched(
        page_size=page_size,
        num_pages=random.choice([48, 96]) // page_size,
        vocab_size=5,
        depth=random.choice([1, 1, 2]),
        window=window,
        plan={
            "max_running": 6,
            "mixed": random.random() < 0.8,
            "new_token_ratio": 0.0,
            "min_new_token_ratio": 0.0,
            "chunk_tokens": random.choice([None, 4]),
            "max_drafts": random.choice([2, 8]),
            "max_step_drafts": random.choice([3, 256]),
            "draft_topk": random.choice([1, 2, 3]),
            "max_tree_drafts": 12,
            "draft_methods": random.choice(["lookup", "lookup", "model", "both"]),
        },
    )
    drive, interrupted, added = watched.drive, set[Sequence](), list[Sequence]()
    for number in range(120):
        action = random.random()
        if action < 0.12:
            make = random.choice([greedy, greedy, plain])
            stop_ids = random.choice([(), (), (3,)])
            num_new = random.randrange(1, 30)
            added.append(make(number, vocab_size=5, stop_ids=stop_ids, max_new_tokens=num_new, seed=number % 3))
            watched.add(added[-1])
        elif action < 0.16 and added:
            sequence = random.choice(added)
            if sequence.finish is None:
                interrupted.add(sequence)
                drive.scheduler.abort([sequence], Finish("abort", message="gone"))
        elif action < 0.18 and drive.runner.num_in_flight:
            drive.scheduler.fail(drive.runner.drop())
            interrupted |= {sequence for sequence in added if sequence.finish is not None}
        elif action < 0.22 and drive.runner.num_in_flight:
            drive.apply()
        else:
            drive.step()
        drive.scheduler.check()
    drive.run()
    for sequence in added:
        output, expected = drive.output(sequence), drive.expected(sequence)
        assert output == (expected[: len(output)] if sequence in interrupted else expected)
    assert drive.cache.num_used == 0
    FOLLOWED[seed] = sum(map(len, watched.followers))


def test_rows_followed_drafts_in_most_of_these_runs():
    assert not FOLLOWED or sum(map(bool, FOLLOWED.values())) >= len(FOLLOWED) // 2
