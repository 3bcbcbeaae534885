"""The waiting queue and in which order it is tried."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain

from runtime.errors import ConfigurationError
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.kv_cache.radix_tree import Node
from runtime.sequence import Sequence

MATCHED_QUEUE_LENGTH = 128  # looking up longer queues in the prefix tree costs more than it gains

Policy = Callable[[list[Sequence], PrefixCache], list[Sequence]]


class WaitingQueue:
    """Sequences that are not running: retracted ones first, then the others as the policy says."""

    def __init__(self, policy: str, cache: PrefixCache) -> None:
        self._sort = _policy(policy)
        self._cache = cache
        self._retracted: deque[Sequence] = deque()
        self._queued: dict[Sequence, None] = {}  # an ordered set

    def __len__(self) -> int:
        return len(self._retracted) + len(self._queued)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._retracted, self._queued)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._queued or sequence in self._retracted

    def add(self, sequence: Sequence) -> None:
        self._queued[sequence] = None

    def put_back(self, sequence: Sequence) -> None:
        """A running sequence returns to the head."""
        self._retracted.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._queued:
            del self._queued[sequence]
        else:
            self._retracted.remove(sequence)

    def clear(self) -> None:
        self._retracted.clear()
        self._queued.clear()

    def ordered(self) -> Iterable[Sequence]:
        """In the order of admission. The queue must not change while this is read."""
        if self._sort is None or len(self._queued) < 2:
            return self
        return chain(self._retracted, self._sort(list(self._queued), self._cache))


def _policy(name: str) -> Policy | None:
    if name == "fcfs":
        return None
    if name == "random":
        return _Shuffle()
    policies: dict[str, Policy] = {
        "lpm": longest_prefix_first,
        "dfs-weight": along_the_tree,
        "lof": longest_output_first,
    }
    if name not in policies:
        raise ConfigurationError(
            f"schedule_policy {name!r} is unknown; use one of fcfs, random, {', '.join(policies)}."
        )
    return policies[name]


class _Shuffle:
    def __init__(self) -> None:
        self._random = random.Random(0)

    def __call__(self, waiting: list[Sequence], cache: PrefixCache) -> list[Sequence]:
        self._random.shuffle(waiting)
        return waiting


def longest_output_first(waiting: list[Sequence], cache: PrefixCache) -> list[Sequence]:
    """The sequence that may produce most comes first."""
    return sorted(waiting, key=lambda sequence: sequence.num_prompt - sequence.max_tokens)


def longest_prefix_first(waiting: list[Sequence], cache: PrefixCache) -> list[Sequence]:
    """The sequence with most tokens in the prefix tree comes first; arrival decides among equals."""
    if not cache.enabled or len(waiting) > MATCHED_QUEUE_LENGTH:
        return waiting
    return sorted(waiting, key=lambda sequence: -cache.match_length(sequence))


def along_the_tree(waiting: list[Sequence], cache: PrefixCache) -> list[Sequence]:
    """Depth first through the prefix tree, the branch with most sequences waiting on it first.

    Sequences that share a prefix then run close together, while its pages are held anyway.
    """
    if not cache.enabled or len(waiting) > MATCHED_QUEUE_LENGTH:
        return waiting
    paths = [(cache.path(sequence), sequence) for sequence in waiting]
    weights: dict[Node, int] = {}
    for path, _ in paths:
        for node in path:
            weights[node] = weights.get(node, 0) + 1
    positions = {node: position for position, node in enumerate(weights)}  # arrival decides among equals
    # Below a node its branches come first, and then the sequences whose path ends there.
    end = (1, 0)
    keyed = [
        ([*((-weights[node], positions[node]) for node in path), end], sequence) for path, sequence in paths
    ]
    return [sequence for _, sequence in sorted(keyed, key=lambda pair: pair[0])]
