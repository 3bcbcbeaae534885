"""Prompt lookup proposes after matches whose proposals paid off in earlier requests, and tries the others again."""

from __future__ import annotations

import pytest

from runtime.speculative.gain import DraftGain
from runtime.speculative.match_odds import FIRST_PAUSE, TRIES, MatchOdds
from runtime.speculative.ngram import LookupSettings, NgramDrafter


def share(odds: MatchOdds, length: int, num_accepted: int, num_matches: int = 1000) -> float:
    """Return the share of matches with a proposal, if every proposal has this number of accepted ids."""
    count = 0
    for _ in range(num_matches):
        if odds.pays(length):
            count += 1
            odds.begin(length)
            odds.note(length, num_accepted)
    return count / num_matches


def test_a_length_that_does_not_pay_off_is_tried_ever_more_rarely() -> None:
    odds = MatchOdds(8)
    assert share(odds, 2, 0) == 1.0  # nothing is known about the cost
    odds.cost = 1.5
    assert 0 < share(odds, 2, 0, 1000) < 0.01
    assert share(odds, 2, 1, 8000) < 0.001
    assert share(odds, 8, 4) == 1.0  # other lengths are not affected


def test_a_retry_that_pays_off_ends_the_pause() -> None:
    odds = MatchOdds(8)
    odds.cost = 1.5
    share(odds, 3, 0, TRIES + FIRST_PAUSE)
    assert share(odds, 3, 2, 10 * FIRST_PAUSE) > 0.7


def test_a_match_without_ids_to_propose_does_not_lengthen_the_pause() -> None:
    odds = MatchOdds(8)
    odds.cost = 1.5
    share(odds, 3, 0, TRIES + FIRST_PAUSE)  # the first retry has failed
    assert sum(odds.pays(3) for _ in range(10 * FIRST_PAUSE)) > 8 * FIRST_PAUSE  # none has ids
    assert share(odds, 3, 0, 1) == 1.0
    assert share(odds, 3, 0, 4 * FIRST_PAUSE) == 1 / (4 * FIRST_PAUSE)  # the second retry has failed


def test_a_match_counts_with_its_tokens_of_the_output() -> None:
    odds, ids = MatchOdds(8), [1, 2, 3, 4, 9, 1, 2, 3, 4]
    odds.cost = 1.5
    share(odds, 0, 0, TRIES)
    for num_prompt, proposed in ((len(ids), []), (len(ids) - 1, [9, 1])):
        drafter = NgramDrafter(2, LookupSettings(), odds=odds, num_prompt=num_prompt)
        assert drafter.propose(ids, 0, 4) == proposed
    assert drafter.propose(ids, 0, 4)
    share(odds, 1, 0, TRIES)
    assert drafter.propose(ids, 0, 4) == []


@pytest.mark.parametrize(("rows", "seconds", "cost"), [(1, 2.5, 1.5), (4, 1.5, 0.5 * 4 / 2)])
def test_the_cost_is_the_time_of_drafts_in_plain_tokens(rows: int, seconds: float, cost: float) -> None:
    """A plain step takes 1 s. A step with drafts in `drafted_rows` rows takes `seconds`, and the next step 1 s."""
    gain, drafted_rows = DraftGain(), 1 if rows == 1 else 2
    assert gain.cost(rows) is None
    for accepted in (0, 5, 2, 0, 1):
        gain.note(rows, drafted=False, num_tokens=rows, seconds=1.0)
        gain.note(
            rows,
            drafted=True,
            num_tokens=rows + accepted,
            seconds=seconds,
            drafted_rows=drafted_rows,
            accepted=accepted,
        )
        gain.note(rows, drafted=False, follows=True, num_tokens=rows, seconds=1.0)
    assert gain.cost(rows) == pytest.approx(cost)
