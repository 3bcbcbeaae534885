from __future__ import annotations

import pytest

from fake_runner import make_plan, make_sequence
from runtime.scheduler.budget import NewTokenRatio, PromptBudget, pages_ahead


def test_a_cut_ends_at_a_page_boundary():
    budget = PromptBudget(make_plan(chunk_tokens=10), 4, 0)
    assert budget.grant(4, 40) == 8
    assert budget.grant(4, 13) == 9  # a prompt that ends within the budget is not cut
    budget.spend(8)
    assert budget.grant(0, 5) == 0
    assert budget.grant(0, 2) == 2
    assert not budget.exhausted
    budget.spend(2)
    assert budget.exhausted


def test_both_limits_hold():
    budget = PromptBudget(make_plan(chunk_tokens=100, max_prefill_tokens=12), 4, 0)
    assert budget.grant(0, 50) == 12
    budget.spend(12)
    assert budget.exhausted


def test_a_step_with_enough_tokens_takes_no_further_prompt_and_cuts_none():
    budget = PromptBudget(make_plan(chunk_tokens=100), 4, 0, 10)
    assert budget.grant(0, 30) == 30
    budget.spend(8)
    assert not budget.exhausted
    assert budget.grant(0, 30) == 30
    budget.spend(30)
    assert budget.exhausted


def test_decode_rows_are_deducted_down_to_a_page():
    assert PromptBudget(make_plan(chunk_tokens=16), 4, 5).grant(0, 50) == 8
    assert PromptBudget(make_plan(chunk_tokens=16), 4, 50).grant(0, 50) == 4


def test_without_chunks_only_the_first_prompt_may_exceed_the_limit():
    budget = PromptBudget(make_plan(chunk_tokens=None, max_prefill_tokens=10), 4, 0)
    assert budget.grant(0, 50) == 50
    budget.spend(3)
    assert budget.grant(0, 8) == 0
    assert budget.grant(0, 7) == 7


def test_the_ratio_sinks_to_its_minimum_and_starts_anew_when_idle():
    ratio = NewTokenRatio(make_plan(new_token_ratio=0.5, min_new_token_ratio=0.2, new_token_ratio_decay=0.125))
    values = []
    for _ in range(4):
        ratio.decay()
        values.append(ratio.value)
    assert values == [0.375, 0.25, 0.2, 0.2]
    ratio.reset()
    assert ratio.value == 0.5


def test_a_retraction_lifts_the_ratio_to_what_was_really_produced():
    ratio = NewTokenRatio(make_plan(min_new_token_ratio=0.1))
    first, second = make_sequence([1], max_new_tokens=100), make_sequence([1], max_new_tokens=300)
    first.num_pending = 60
    ratio.lift([first, second])
    assert ratio.value == (60 + 20 + 20) / 400
    ratio.lift([make_sequence([1], max_new_tokens=5)])
    assert ratio.value == 1.0
    ratio.lift([make_sequence([1], max_new_tokens=10_000)])
    assert ratio.value == 0.1


@pytest.mark.parametrize(
    ("max_new_tokens", "ratio", "pages"),
    [(8, 0.0, 1), (8, 1.0, 3), (8, 0.5, 2), (100_000, 1.0, 1 + 4096 // 4)],
)
def test_pages_ahead_count_known_tokens_and_a_share_of_the_output(max_new_tokens: int, ratio: float, pages: int):
    assert pages_ahead(make_sequence([1] * 4, max_new_tokens=max_new_tokens), ratio, 4) == pages


def test_some_pages_are_reserved_whatever_the_ratio():
    ratio = NewTokenRatio(make_plan(new_token_ratio=0.25, reserved_tokens=8, open_ended_tokens=1))
    long, short = (make_sequence([1] * 4, max_new_tokens=count) for count in (100, 4))
    assert [ratio.pages_ahead(each, 4) for each in (long, short)] == [1 + 25 // 4 + 1, 2]
    ratio.value = 0.0
    assert [ratio.pages_ahead(each, 4) for each in (long, short)] == [3, 2]


def test_pages_that_are_held_are_not_ahead():
    sequence = make_sequence([1] * 4, max_new_tokens=8)
    sequence.pages = [0, 1]
    assert pages_ahead(sequence, 1.0, 4) == 1
    assert pages_ahead(sequence, 0.0, 4) == 0
