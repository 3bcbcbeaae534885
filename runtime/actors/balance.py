"""Which replica takes the next request: pure functions of what each of them holds now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

# Longest-prefix placement gives way when its choice has this many more requests than the least busy replica,
# beyond twice as many: a popular prefix is then computed a second time elsewhere, and shared there as well.
PREFIX_SLACK = 8


class Standing(NamedTuple):
    """What is known of one replica when a request arrives."""

    num_requests: int  # that it has and that have not ended
    num_tokens: int  # of these, prompt and output so far
    num_cached: int  # tokens of the new prompt that it has in its cache


Choose = Callable[[Sequence[Standing]], int]  # the replicas that can take it -> index of the one that does


def chooser(method: str) -> Choose:
    """The function for a `--load-balance-method`. Raises KeyError for a name that does not exist."""
    return {
        "round_robin": _RoundRobin,
        "shortest_queue": lambda: shortest_queue,
        "minimum_tokens": lambda: minimum_tokens,
        "longest_prefix": lambda: longest_prefix,
    }[method]()


class _RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._turns = count()

    def __call__(self, replicas: Sequence[Standing]) -> int:
        return next(self._turns) % len(replicas)


def shortest_queue(replicas: Sequence[Standing]) -> int:
    """Who has fewest requests, and of those fewest tokens."""
    return min(range(len(replicas)), key=lambda i: (replicas[i].num_requests, replicas[i].num_tokens))


def minimum_tokens(replicas: Sequence[Standing]) -> int:
    """Who has fewest tokens in its requests, and of those fewest requests."""
    return min(range(len(replicas)), key=lambda i: (replicas[i].num_tokens, replicas[i].num_requests))


def longest_prefix(replicas: Sequence[Standing]) -> int:
    """Who has most of the prompt in its cache, unless it is much busier than others; else fewest tokens."""
    best = max(
        range(len(replicas)),
        key=lambda i: (replicas[i].num_cached, -replicas[i].num_tokens, -replicas[i].num_requests),
    )
    idlest = min(replica.num_requests for replica in replicas)
    if replicas[best].num_cached and replicas[best].num_requests <= 2 * idlest + PREFIX_SLACK:
        return best
    return minimum_tokens(replicas)
