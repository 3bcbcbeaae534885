"""Who takes the next request."""

from __future__ import annotations

import pytest

from runtime.actors.balance import PREFIX_SLACK, Standing, chooser


def pick(method: str, *replicas: tuple[int, int, int]) -> int:
    return chooser(method)([Standing(*replica) for replica in replicas])


def test_round_robin_takes_turns_whatever_they_hold():
    choose = chooser("round_robin")
    replicas = [Standing(9, 9, 9), Standing(0, 0, 0), Standing(5, 5, 5)]
    assert [choose(replicas) for _ in range(5)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(
    ("method", "chosen"), [("shortest_queue", 1), ("minimum_tokens", 2), ("longest_prefix", 0)]
)
def test_each_method_looks_at_its_own_measure(method: str, chosen: int):
    assert pick(method, (4, 900, 64), (2, 500, 0), (3, 100, 16)) == chosen


def test_equal_queues_are_told_apart_by_tokens():
    assert pick("shortest_queue", (2, 50, 0), (2, 40, 0)) == 1
    assert pick("minimum_tokens", (2, 50, 0), (1, 50, 0)) == 1


def test_prefix_gives_way_to_a_replica_that_is_much_less_busy():
    assert pick("longest_prefix", (PREFIX_SLACK, 500, 64), (0, 0, 0)) == 0
    assert pick("longest_prefix", (PREFIX_SLACK + 1, 500, 64), (0, 0, 0)) == 1


def test_without_any_prefix_tokens_decide():
    assert pick("longest_prefix", (2, 50, 0), (9, 40, 0)) == 1
