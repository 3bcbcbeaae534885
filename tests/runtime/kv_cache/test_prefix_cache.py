from __future__ import annotations

import pytest

from fake_runner import make_sequence
from runtime.kv_cache.prefix_cache import PrefixCache, reusable_tokens
from runtime.request import LogprobParams
from runtime.sequence import Sequence


def compute(cache: PrefixCache, sequence: Sequence, end: int) -> None:
    """Allocate pages for the first `end` tokens, like a step that computes them."""
    sequence.pages += cache.allocate(-(-end // cache.page_size) - len(sequence.pages))
    sequence.num_computed = end


def test_a_released_sequence_leaves_whole_pages_to_be_found():
    cache = PrefixCache(8, 4)
    first = make_sequence(range(10))
    cache.lock(first)
    compute(cache, first, 10)
    cache.release(first)
    assert (cache.num_free, cache.num_evictable) == (6, 2)
    second = make_sequence(range(10))
    cache.lock(second)
    assert second.num_shared == second.num_computed == 8
    assert len(second.pages) == 2
    cache.check([second])


def test_at_least_one_token_is_left_to_compute():
    cache = PrefixCache(8, 4)
    first = make_sequence(range(8))
    cache.lock(first)
    compute(cache, first, 8)
    cache.release(first)
    assert cache.match_length(first) == 4
    assert cache.match_length(make_sequence(range(9))) == 8


def test_wanted_prompt_logprobs_limit_what_is_reused():
    assert reusable_tokens(make_sequence(range(8), logprobs=LogprobParams(start=3))) == 3
    assert reusable_tokens(make_sequence(range(8), logprobs=LogprobParams(start=-1))) == 7
    asked = make_sequence(range(8), logprobs=LogprobParams(start=3))
    asked.next_logprob = 7  # all logprobs were requested before a retraction
    assert reusable_tokens(asked) == 7


def test_pages_computed_twice_give_way_to_those_of_the_tree():
    cache = PrefixCache(8, 2)
    first, second = make_sequence(range(4)), make_sequence(range(4))
    for sequence in (first, second):
        cache.lock(sequence)
        compute(cache, sequence, 4)
    assert cache.insert(first) is None
    own = list(second.pages)
    duplicates = cache.insert(second)
    assert duplicates is not None
    assert (duplicates.first, duplicates.pages) == (0, own)
    assert second.pages == first.pages
    cache.free(duplicates.pages)
    cache.check([first, second])


def test_pending_tokens_are_not_shared():
    cache = PrefixCache(8, 2)
    sequence = make_sequence(range(3))
    sequence.num_pending = 2
    cache.lock(sequence)
    compute(cache, sequence, 4)  # the fourth token is computed but not known yet
    cache.insert(sequence)
    assert sequence.num_shared == 2
    cache.check([sequence])


def test_allocating_pages_evicts_unused_pages():
    cache = PrefixCache(4, 1)
    old = make_sequence([1, 2, 3])
    cache.lock(old)
    compute(cache, old, 3)
    cache.release(old)
    assert (cache.num_free, cache.num_available, cache.num_used) == (1, 4, 0)
    new = make_sequence([7, 8, 9])
    cache.lock(new)
    compute(cache, new, 3)
    cache.check([new])
    assert cache.num_used == 3
    with pytest.raises(ValueError, match="2 pages requested, 1 free"):
        cache.allocate(2)


def test_a_disabled_cache_shares_and_keeps_nothing():
    cache = PrefixCache(4, 1, enabled=False)
    for _ in range(3):
        sequence = make_sequence([1, 2, 3])
        cache.lock(sequence)
        assert sequence.pages == []
        compute(cache, sequence, 3)
        assert cache.insert(sequence) is None
        cache.check([sequence])
        cache.release(sequence)
        assert cache.num_free == 4


def test_untrusted_pages_are_not_found_again():
    cache = PrefixCache(8, 1)
    broken, other = make_sequence([1, 2, 3, 4]), make_sequence([1, 2, 9])
    for sequence in (broken, other):
        cache.lock(sequence)
        compute(cache, sequence, len(sequence.ids))
        duplicates = cache.insert(sequence)
        if duplicates is not None:
            cache.free(duplicates.pages)
    cache.discard(broken)
    cache.check([other])
    assert cache.match_length(make_sequence([1, 2, 3, 4, 5])) == 2  # pages that the other sequence still holds


def test_emptying_spares_what_is_locked():
    cache = PrefixCache(8, 1)
    gone, held = make_sequence([1, 2]), make_sequence([3, 4])
    for sequence in (gone, held):
        cache.lock(sequence)
        compute(cache, sequence, 2)
        cache.insert(sequence)
    cache.release(gone)
    cache.empty()
    cache.check([held])
    assert (cache.num_evictable, cache.num_used) == (0, 2)


def test_reset_forgets_everything_whatever_was_held():
    cache = PrefixCache(8, 1)
    sequence = make_sequence([1, 2, 3])
    cache.lock(sequence)
    compute(cache, sequence, 3)
    cache.insert(sequence)
    cache.reset([sequence])
    assert cache.num_free == 8
    assert (sequence.pages, sequence.locked_node, sequence.num_computed) == ([], None, 0)
    cache.check([])


def test_check_finds_a_page_without_owner():
    cache = PrefixCache(4, 1)
    cache.allocate(1)
    with pytest.raises(ValueError, match="do not balance"):
        cache.check([])
