from __future__ import annotations

import math

import pytest

from fake_runner import Drive, make_plan, make_sequence
from runtime.errors import ConfigurationError
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.request import Request
from runtime.scheduler.queue import WaitingQueue
from runtime.sequence import Sequence


def cache_with(*prefixes: list[int]) -> PrefixCache:
    """Return a cache with pages of one token that holds these prefixes."""
    cache = PrefixCache(100, 1)
    for prefix in prefixes:
        sequence = make_sequence(prefix)
        cache.lock(sequence)
        sequence.pages += cache.allocate(len(prefix) - len(sequence.pages))
        sequence.num_computed = len(prefix)
        cache.release(sequence)
    return cache


def ordered(policy: str, cache: PrefixCache, sequences: list[Sequence]) -> list[int]:
    """Return the indices of the sequences in the order of admission."""
    queue = WaitingQueue(policy, cache)
    for sequence in sequences:
        queue.add(sequence)
    return [sequences.index(sequence) for sequence in queue.ordered()]


def test_fcfs_keeps_the_order_of_arrival():
    cache = cache_with([1, 2, 3])
    assert ordered("fcfs", cache, [make_sequence([9]), make_sequence([1, 2, 3, 4])]) == [0, 1]


def test_lpm_tries_the_longest_known_prefix_first():
    prompts = [[9, 9], [1, 9], [1, 2, 3, 9], [8, 8]]
    assert ordered("lpm", cache_with([1, 2, 3]), [make_sequence(p) for p in prompts]) == [2, 1, 0, 3]


def test_lpm_looks_up_no_more_than_a_short_queue():
    sequences = [make_sequence([i + 5]) for i in range(128)] + [make_sequence([1, 2, 3, 4])]
    assert ordered("lpm", cache_with([1, 2, 3]), sequences) == list(range(129))
    assert ordered("lpm", cache_with([1, 2, 3]), sequences[1:])[0] == 127


def test_lof_tries_the_longest_output_first():
    sequences = [make_sequence([1] * n, max_new_tokens=m) for n, m in ((1, 2), (9, 7), (1, 7), (3, 9))]
    assert ordered("lof", cache_with(), sequences) == [3, 1, 2, 0]


def test_dfs_weight_takes_the_heaviest_branch_with_all_below_it():
    cache = cache_with([1, 2, 3], [1, 5], [7, 8])
    prompts = [[7, 8, 9], [1, 2, 3, 9], [1, 5, 9], [1, 2, 3, 4], [6, 6]]
    assert ordered("dfs-weight", cache, [make_sequence(p) for p in prompts]) == [1, 3, 2, 0, 4]


def owned(owner: str, prompt: list[int]) -> Sequence:
    return make_sequence(prompt, request=Request(ids=tuple(prompt), owner=owner))


def test_clients_take_turns_and_keep_the_order_of_the_policy_among_their_own():
    sequences = [owned("a", [9, i]) for i in range(4)] + [owned("b", [9]), owned("b", [1, 2, 3, 4])]
    assert ordered("fcfs", cache_with(), sequences) == [0, 4, 1, 5, 2, 3]
    assert ordered("lpm", cache_with([1, 2, 3]), sequences) == [5, 0, 4, 1, 2, 3]


def test_a_client_with_a_long_queue_does_not_take_every_free_slot():
    queue = WaitingQueue("fcfs", cache_with())
    for i in range(6):
        queue.add(owned("a", [i]))
    taken = []
    for step in range(8):
        if step == 2:
            for i in range(2):
                queue.add(owned("b", [i]))
        first = next(iter(queue.ordered()))
        queue.remove(first)
        taken.append(first.request.owner)
    assert "".join(taken) == "aababaaa"
    assert not len(queue)


@pytest.mark.parametrize("policy", ["lpm", "dfs-weight"])
def test_without_a_tree_the_order_is_that_of_arrival(policy: str):
    cache = PrefixCache(10, 1, enabled=False)
    assert ordered(policy, cache, [make_sequence([i]) for i in range(4)]) == [0, 1, 2, 3]


def test_random_tries_everybody_in_changing_order():
    queue = WaitingQueue("random", cache_with())
    sequences = [make_sequence([i]) for i in range(6)]
    for sequence in sequences:
        queue.add(sequence)
    orders = {tuple(sequences.index(s) for s in queue.ordered()) for _ in range(5)}
    assert len(orders) > 1
    assert all(sorted(order) == list(range(6)) for order in orders)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ConfigurationError, match="fcfs, random, lpm, dfs-weight, lof"):
        WaitingQueue("best", cache_with())


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "lof", "dfs-weight", "random"])
def test_retracted_sequences_come_first(policy: str):
    queue = WaitingQueue(policy, cache_with([1, 2, 3]))
    queue.add(make_sequence([1, 2, 3, 4], max_new_tokens=50))
    first, second = make_sequence([8]), make_sequence([9])
    queue.put_back(second)
    queue.put_back(first)
    assert [*queue.ordered()][:2] == [first, second]
    queue.remove(first)
    assert len(queue) == 2


def test_the_policy_decides_who_runs_first():
    drive = Drive(make_plan(policy="lof", max_running=1), depth=0)
    short, long = make_sequence([1], max_new_tokens=1), make_sequence([2], max_new_tokens=3)
    drive.add(short, long)
    drive.run()
    assert [delta.request_id for delta in drive.deltas] == [long.request.id] * 3 + [short.request.id]


def test_the_tokens_before_a_request_are_counted_without_a_pass_over_the_queue(monkeypatch: pytest.MonkeyPatch):
    queue = WaitingQueue("fcfs", cache_with(), priorities=True)
    sequences = [make_sequence([1] * (n + 1), urgency=n % 3) for n in range(9)]
    for sequence in sequences:
        queue.add(sequence)
    queue.remove(sequences[4])
    monkeypatch.delattr(WaitingQueue, "__iter__")
    assert [queue.num_tokens_from(urgency) for urgency in (-math.inf, 0, 1, 2, 3)] == [40, 40, 28, 18, 0]
    queue.clear()
    assert queue.num_tokens_from(-math.inf) == 0


def test_urgent_sequences_of_a_client_count_before_its_others():
    queue = WaitingQueue("fcfs", cache_with(), priorities=True)
    shapes = [("a", 0), ("a", 0), ("a", 1), ("b", 0)]
    sequences = [make_sequence([1], owner=owner, urgency=urgency) for owner, urgency in shapes]
    for sequence in sequences:
        queue.add(sequence)
    assert [sequences.index(each) for each in queue.ordered()] == [2, 3, 0, 1]
