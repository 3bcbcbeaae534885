"""Prompt lookup proposes the tokens that followed an earlier occurrence, and stops if this does not help."""

from __future__ import annotations

import random
from time import perf_counter

from runtime.speculative import ngram
from runtime.speculative.ngram import NgramDrafter


def drafter(max_drafts: int = 8, windows: tuple[int, int] = (2, 8)) -> NgramDrafter:
    return NgramDrafter(max_drafts, *windows)


def test_what_followed_the_last_tokens_is_proposed():
    ids = [1, 2, 3, 4, 5, 6, 7, 9, 2, 3]
    assert drafter().propose(ids, 0, 8) == [4, 5, 6, 7]
    assert drafter().propose(ids, 0, 2) == [4, 5]


def test_the_last_occurrence_of_the_longest_run_decides():
    assert drafter(1).propose([1, 2, 8, 1, 2, 9, 1, 2], 0, 1) == [9]
    long_run = [5, 1, 2, 3, 8, 6, 2, 3, 9, 5, 1, 2, 3]
    assert drafter(1, (2, 4)).propose(long_run, 0, 1) == [8]


def test_text_without_repetition_has_no_drafts():
    assert drafter().propose(list(range(50)), 0, 8) == []
    assert drafter().propose([1], 0, 8) == []


def test_a_period_goes_on():
    assert drafter().propose([7, 1, 2, 1, 2], 0, 4) == [1, 2, 1, 2]


def test_pending_tokens_are_taken_to_be_the_next_of_the_match():
    assert drafter().propose([1, 2, 3, 4, 5, 6, 7, 1, 2], 1, 8) == [4, 5, 6, 7]


def test_proposals_grow_with_success_and_shrink_to_what_was_accepted():
    ids = [*range(1, 30), 1, 2]
    lookup = drafter()
    lookup.note(4, 4, 0)
    assert len(lookup.propose(ids, 0, 8)) == 8
    lookup.note(8, 2, 0)
    assert len(lookup.propose(ids, 0, 8)) == 3


def test_failures_pause_for_twice_as_long_each_time():
    ids = [*range(1, 30), 1, 2]
    lookup = drafter()
    lookup.note(4, 0, len(ids))
    assert lookup.propose(ids, 0, 8) == []
    lookup = drafter()
    lookup.note(4, 0, len(ids) - 2)
    assert lookup.propose(ids, 0, 8) == [3]
    lookup.note(1, 0, len(ids) - 2)
    assert lookup.propose(ids, 0, 8) == []


def test_tokens_indexed_one_by_one_or_at_once_give_the_same_proposals():
    draw = random.Random(3)
    ids = [draw.randrange(6) for _ in range(400)]
    growing = drafter()
    for length in range(1, len(ids) + 1):
        assert growing.propose(ids[:length], 0, 8) == drafter().propose(ids[:length], 0, 8)


def test_a_long_prompt_is_indexed_in_parts():
    size = ngram.CATCH_UP_TOKENS
    ids = [*range(3 * size), 0, 1]
    lookup = drafter()
    found = [lookup.propose(ids, 0, 8) for _ in range(5)]
    assert found[0] == []
    assert found[-1] == [2, 3, 4, 5]


def test_a_proposal_takes_microseconds():
    draw = random.Random(1)
    ids = [draw.randrange(50) for _ in range(2000)]
    lookup = drafter()
    lookup.propose(ids, 0, 8)
    times = []
    for _ in range(500):
        ids.append(draw.randrange(50))
        began = perf_counter()
        lookup.propose(ids, 0, 8)
        times.append(perf_counter() - began)
    assert sorted(times)[250] < 100e-6, "the median is about 5 us"
