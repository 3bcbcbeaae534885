"""Prompt lookup proposes the tokens that followed an earlier occurrence, and stops if this does not help."""

from __future__ import annotations

import random
from time import perf_counter
from typing import Any

from runtime.speculative import ngram
from runtime.speculative.ngram import CatchUp, LookupSettings, NgramDrafter
from runtime.speculative.suffix_automaton import SuffixAutomaton


def drafter(max_drafts: int = 8, windows: tuple[int, int] = (2, 8), **settings: Any) -> NgramDrafter:
    return NgramDrafter(max_drafts, LookupSettings(*windows, **settings))


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


def test_the_automaton_knows_every_string_with_its_last_end_and_count():
    draw = random.Random(5)
    for _ in range(60):
        count, most = draw.randrange(1, 50), draw.randrange(1, 7)
        ids = [draw.randrange(draw.choice([1, 2, 4])) for _ in range(count)]
        automaton = SuffixAutomaton(most)
        for token in ids:
            automaton.extend([token])
        for begin in range(count):
            state = 0
            for end in range(begin + 1, min(begin + most, count) + 1):
                state, text = automaton.nexts[state][ids[end - 1]], ids[begin:end]
                found = [last for last in range(len(text), count + 1) if ids[last - len(text) : last] == text]
                assert (automaton.ends[state], automaton.counts[state]) == (found[-1], len(found))


def test_the_most_frequent_continuation_is_proposed():
    ids = [1, 2, 8, 5, 1, 2, 8, 6, 1, 2, 9, 7, 1, 2]
    assert drafter(2).propose(ids, 0, 2) == [9, 7]
    assert drafter(2, by_frequency=True).propose(ids, 0, 1) == [8]


def test_a_tree_has_the_other_continuations():
    ids = [1, 2, 8, 5, 0, 1, 2, 8, 5, 1, 2, 9, 7, 3, 1, 2]
    lookup = drafter(4, max_breadth=4, max_ids=6)
    assert lookup.propose(ids, 0, 3) == [9, 7, 3]
    assert lookup.alternatives([9, 7, 3]) == [(1, [8, 5, 1])]
    assert drafter(4, max_breadth=1, max_ids=6).alternatives([9, 7, 3]) == []
    frequent = drafter(4, max_breadth=4, max_ids=4, by_frequency=True)
    assert frequent.propose(ids, 0, 2) == [8, 5]
    assert frequent.alternatives([8, 5]) == [(1, [9, 7])]


def test_alternatives_fit_the_limits():
    draw = random.Random(2)
    for trial in range(200):
        ids = [draw.randrange(3) for _ in range(draw.randrange(2, 80))]
        lookup = drafter(8, max_breadth=draw.randrange(2, 6), max_ids=10, by_frequency=bool(trial % 2))
        proposed = lookup.propose(ids, 0, draw.randrange(1, 9))
        found = lookup.alternatives(proposed) if proposed else []
        assert len(proposed) + sum(len(own) for _, own in found) <= 10
        assert all(1 <= depth <= len(proposed) and own[0] != proposed[depth - 1] for depth, own in found)
        assert len({(depth, own[0]) for depth, own in found}) == len(found)


def test_the_oldest_text_is_forgotten_beyond_the_capacity():
    lookup = drafter(4, capacity=1024)
    ids = [10_000, 10_001, 10_002, *range(3000), 10_000, 10_001]
    found = [lookup.propose(ids, 0, 4) for _ in range(5)]
    assert found[-1] == []
    ids = [*range(3000), 2900, 2901]
    lookup = drafter(4, capacity=1024)
    found = [lookup.propose(ids, 0, 4) for _ in range(5)]
    assert found[-1] == [2902, 2903, 2904, 2905]


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


def test_a_text_beyond_a_small_capacity_is_not_indexed_in_one_call(monkeypatch):
    counts = []
    extend = SuffixAutomaton.extend

    def counted(self: SuffixAutomaton, tokens: list[int]) -> None:
        counts.append(len(tokens))
        extend(self, tokens)

    monkeypatch.setattr(SuffixAutomaton, "extend", counted)
    small, ids = drafter(capacity=1024), [*range(5000), 4990, 4991]
    assert small.propose(ids, 0, 4) == []
    assert counts == [ngram.CATCH_UP_TOKENS]
    for _ in range(20):
        found = small.propose(ids, 0, 4)
    assert found == [4992, 4993, 4994, 4995]


def test_long_texts_share_what_is_indexed_in_a_step():
    budget = CatchUp()
    ids = [number % 5000 for number in range(10_000)]
    drafters = [NgramDrafter(4, LookupSettings(), budget) for _ in range(4)]
    for drafter in drafters:
        assert drafter.propose(ids, 0, 4) == []
    sizes = [drafter._index.num_tokens for drafter in drafters]
    assert sizes == [ngram.CATCH_UP_TOKENS, ngram.STEP_TOKENS - ngram.CATCH_UP_TOKENS, 0, 0]
    short = NgramDrafter(4, LookupSettings(), budget)
    assert short.propose([1, 2, 3, 4, 1, 2], 0, 2) == [3, 4]  # short texts do not wait


def test_an_n_gram_with_many_continuations_is_looked_up_quickly() -> None:
    """The most recent continuation is found without a look at all of them. Trees compare only some."""
    ids = [token for other in range(10, 20_000) for token in (1, 2, other)] + [1, 2]
    for settings in ({}, {"by_frequency": True}, {"max_breadth": 3, "max_ids": 16}):
        lookup = drafter(8, (2, 8), **settings)
        while not (found := lookup.propose(ids, 0, 8)):
            pass
        assert settings.get("by_frequency") or found[0] == 19_999
        state = lookup._state
        assert len(lookup._index.nexts[state]) > 10_000
        assert len([*lookup._compared(lookup._index.nexts[state])]) == ngram.MAX_CONTINUATIONS
        lookup.alternatives(found)
