"""Admission of requests without a limit depends on the measured length of such outputs, not on the context length."""

from __future__ import annotations

import pytest

from fake_runner import Drive, make_plan, make_sequence, reference_output
from runtime.scheduler.budget import NewTokenRatio
from runtime.sequence import Sequence

PAGES, PAGE_SIZE, VOCAB = 96, 4, 5000


def crowd(count: int, length: int) -> list[Sequence]:
    """Return sequences without a limit, whose outputs end after this number of tokens."""
    found = []
    for seed in range(count):
        free = make_sequence([seed, 3, 5], max_new_tokens=length, seed=seed)
        output = reference_output(free, VOCAB)
        found.append(make_sequence([seed, 3, 5], max_new_tokens=None, seed=seed, stop_ids=[output[-1]]))
    return found


def drive_of(open_ended_tokens: int, **plan: object) -> Drive:
    made = make_plan(max_running=24, open_ended_tokens=open_ended_tokens, **plan)
    return Drive(made, num_pages=PAGES, page_size=PAGE_SIZE, context_length=PAGES * PAGE_SIZE, vocab_size=VOCAB)


def most_running(drive: Drive) -> int:
    most = 0
    for _ in range(2000):
        idle = not drive.runner.num_in_flight
        if drive.step() is None and idle:
            return most
        most = max(most, drive.scheduler.num_running)
    raise AssertionError("not finished")


@pytest.mark.parametrize("depth", [0, 1])
def test_many_run_at_once_although_each_could_fill_the_cache(depth: int) -> None:
    drive = drive_of(12)
    drive.depth = depth
    sequences = crowd(24, 10)
    drive.add(*sequences)
    assert most_running(drive) >= 16  # at least twenty further tokens are expected of each sequence
    assert [drive.output(s) for s in sequences] == [drive.expected(s) for s in sequences]


def test_too_low_an_estimate_costs_retractions_and_no_output() -> None:
    drive = drive_of(1)
    sequences = crowd(24, 60)
    drive.add(*sequences)
    drive.run(5000)
    assert drive.scheduler.num_retracted > 0
    assert [drive.output(s) for s in sequences] == [drive.expected(s) for s in sequences]


def test_the_estimate_follows_the_outputs_that_end() -> None:
    ratio = NewTokenRatio(make_plan(open_ended_tokens=100))
    short, limited = make_sequence([1], max_new_tokens=None), make_sequence([1], max_new_tokens=4)
    short.ids += [2] * 20
    limited.ids += [2] * 4
    for _ in range(200):
        ratio.note_end(short)
    assert ratio.open_tokens == pytest.approx(20, abs=0.1)
    ratio.note_end(limited)
    assert ratio.open_tokens == pytest.approx(20, abs=0.1)
    long = make_sequence([1], max_new_tokens=None)
    long.ids += [2] * 300
    ratio.lift([long, limited])  # a retraction: outputs were longer than expected
    assert ratio.open_tokens == 320


def test_a_stated_limit_still_needs_its_room() -> None:
    drive = drive_of(4, new_token_ratio=1.0, min_new_token_ratio=1.0)
    drive.add(*(make_sequence([seed, 3, 5], max_new_tokens=200, seed=seed) for seed in range(8)))
    drive.step()
    assert drive.scheduler.num_running == 1


def test_aborted_outputs_say_nothing_about_lengths() -> None:
    from runtime.request import Finish

    drive = drive_of(100)
    sequence = make_sequence([1, 2, 3], max_new_tokens=None)
    drive.add(sequence)
    drive.step()
    drive.scheduler.abort([sequence], Finish("abort"))
    other = make_sequence([1, 2, 3], max_new_tokens=None)
    assert drive.scheduler._builder.new_token_ratio.pages_at_first(other, PAGE_SIZE) == -(-103 // PAGE_SIZE)
