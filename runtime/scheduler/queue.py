"""The waiting queue and the policies that order it."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator
from heapq import heapify, heappop, heapreplace
from itertools import chain, groupby

from runtime.errors import ConfigurationError
from runtime.kv_cache.prefix_cache import PrefixCache
from runtime.kv_cache.radix_tree import Node
from runtime.scheduler.owner_shares import OwnerShares
from runtime.sequence import Sequence

MATCHED_QUEUE_LENGTH = 128  # a longer queue is not matched with the prefix tree: this would cost more than it gains

Policy = Callable[[list[Sequence], PrefixCache], list[Sequence]]


class WaitingQueue:
    """The waiting sequences, in the order in which they are admitted.

    Retracted sequences come first, then all other sequences in the order of the policy. If sequences of several owners
    (clients) wait, the next sequence is taken from the owner with the smallest share in `running`; owners with equal
    shares take turns. With `priorities`, urgency comes before these rules: a more urgent sequence is always admitted
    first.
    """

    def __init__(
        self,
        policy: str,
        cache: PrefixCache,
        *,
        priorities: bool = False,
        running: OwnerShares | None = None,
    ) -> None:
        self._sort = _policy(policy)
        self._cache = cache
        self._priorities = priorities
        self._running = OwnerShares({}) if running is None else running
        self._retracted: deque[Sequence] = deque()
        self._queued: dict[Sequence, None] = {}  # an ordered set
        self.num_tokens = 0  # prompt tokens of sequences that have not run yet
        # Urgency -> prompt tokens of sequences with this urgency that have not run yet.
        self._tokens_of: Counter[float] = Counter()
        self._owners: Counter[str] = Counter()  # number of waiting sequences by owner
        # Owner -> number of the turn in which a sequence of this owner last left the queue.
        self._last_turns: dict[str, int] = {}
        self._num_turns = 0
        self.allowed: Container[Sequence] | None = None  # if not None, only these sequences may be admitted

    def __len__(self) -> int:
        return len(self._retracted) + len(self._queued)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._retracted, self._queued)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._queued or sequence in self._retracted

    def add(self, sequence: Sequence) -> None:
        self._queued[sequence] = None
        self.num_tokens += sequence.num_prompt
        self._tokens_of[sequence.urgency] += sequence.num_prompt
        self._owners[sequence.request.owner] += 1

    def put_back(self, sequence: Sequence) -> None:
        """Put a retracted sequence in front of all other sequences of its owner."""
        self._retracted.appendleft(sequence)
        self._owners[sequence.request.owner] += 1

    def remove(self, sequence: Sequence) -> None:
        if sequence in self._queued:
            del self._queued[sequence]
            self.num_tokens -= sequence.num_prompt
            self._tokens_of[sequence.urgency] -= sequence.num_prompt
            if not self._tokens_of[sequence.urgency]:
                del self._tokens_of[sequence.urgency]
            self._num_turns += 1
            self._last_turns[sequence.request.owner] = self._num_turns
        else:
            self._retracted.remove(sequence)
        self._owners[sequence.request.owner] -= 1
        if not self._owners[sequence.request.owner]:
            del self._owners[sequence.request.owner]

    def clear(self) -> None:
        self._retracted.clear()
        self._queued.clear()
        self.num_tokens = 0
        self._tokens_of.clear()
        self._owners.clear()

    def ordered(self) -> Iterable[Sequence]:
        """Return the sequences in the order of admission. The queue must not change during the iteration."""
        if self.allowed is not None:
            return [sequence for sequence in self if sequence in self.allowed]
        waiting = self._policy_order()
        if self._priorities:
            waiting = sorted(waiting, key=lambda sequence: -sequence.urgency)
        return self._in_turns(waiting) if len(self._owners) > 1 else waiting

    def num_tokens_from(self, urgency: float) -> int:
        """Return the number of prompt tokens of the sequences that have at least this urgency and have not run yet."""
        return sum(count for each, count in self._tokens_of.items() if each >= urgency)

    @property
    def is_owed_row(self) -> bool:
        """Whether a running owner should give a row to an owner in the queue (see `OwnerShares.yields`)."""
        return self._running.anyone_yields(self._owners)

    @property
    def least_urgency(self) -> float:
        """Lowest urgency of the sequences that have not run yet.

        Infinity if there is no such sequence, or if priorities are off.
        """
        if not self._priorities:
            return math.inf
        return min((sequence.urgency for sequence in self._queued), default=math.inf)

    def _policy_order(self) -> Iterable[Sequence]:
        queued: Iterable[Sequence] = self._queued
        if self._sort is not None and len(self._queued) > 1:
            queued = self._sort(list(queued), self._cache)
        return chain(self._retracted, queued)

    def _in_turns(self, waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        """Yield all sequences; the next one is always taken from the owner with the smallest share.

        A yielded sequence counts as running from then on. On a tie, the owner whose last turn is longest ago comes
        first. With priorities, `waiting` is sorted by urgency, and only sequences of equal urgency are reordered.
        """
        counts, share = Counter(self._running.counts), self._running.of
        groups = groupby(waiting, lambda sequence: sequence.urgency) if self._priorities else [(0, waiting)]
        for _, equals in groups:
            by_owner: dict[str, list[Sequence]] = {}
            for sequence in equals:
                by_owner.setdefault(sequence.request.owner, []).append(sequence)
            turns = [
                (share(owner, counts[owner]), self._last_turns.get(owner, 0), number, owner, iter(sequences))
                for number, (owner, sequences) in enumerate(by_owner.items())
            ]
            heapify(turns)
            while turns:
                _, last_turn, number, owner, sequences = turns[0]
                sequence = next(sequences, None)
                if sequence is None:
                    heappop(turns)
                    continue
                counts[owner] += 1
                heapreplace(turns, (share(owner, counts[owner]), last_turn, number, owner, sequences))
                yield sequence


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
    """Sort by the maximum output length, longest first."""
    return sorted(waiting, key=lambda sequence: sequence.num_prompt - sequence.max_tokens)


def longest_prefix_first(waiting: list[Sequence], cache: PrefixCache) -> list[Sequence]:
    """Sort by the length of the cached prefix, longest first. Ties keep their order of arrival."""
    if not cache.enabled or len(waiting) > MATCHED_QUEUE_LENGTH:
        return waiting
    return sorted(waiting, key=lambda sequence: -cache.match_length(sequence))


def along_the_tree(waiting: list[Sequence], cache: PrefixCache) -> list[Sequence]:
    """Sort depth first along the prefix tree. The branch with the most waiting sequences comes first.

    Sequences that share a prefix then run at about the same time, while its pages are in use.
    """
    if not cache.enabled or len(waiting) > MATCHED_QUEUE_LENGTH:
        return waiting
    paths = [(cache.path(sequence), sequence) for sequence in waiting]
    weights: dict[Node, int] = {}
    for path, _ in paths:
        for node in path:
            weights[node] = weights.get(node, 0) + 1
    positions = {node: position for position, node in enumerate(weights)}  # ties are broken by the order of arrival
    # At each node, the branches below it come before the sequences whose path ends there.
    end = (1, 0)
    keyed = [([*((-weights[node], positions[node]) for node in path), end], sequence) for path, sequence in paths]
    return [sequence for _, sequence in sorted(keyed, key=lambda pair: pair[0])]
