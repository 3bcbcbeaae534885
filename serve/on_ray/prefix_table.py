"""A table that records which replica computed each recent prompt."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from random import choice
from typing import Generic, TypeVar

from serve.on_ray.prompt_key import PromptKey

R = TypeVar("R")

MAX_HASHES = 500_000  # number of hashes that the table remembers, in about 100 MB
SLACK = 4  # the replica with the longest prefix may have this many requests more than the least busy one


class PrefixTable(Generic[R]):
    """Maps hashes of sessions and of prompt prefixes (`PromptKey`) to the replica that last computed them."""

    def __init__(self, max_hashes: int = MAX_HASHES, slack: int = SLACK) -> None:
        self._owners: OrderedDict[int, R] = OrderedDict()
        self._max_hashes = max_hashes
        self._slack = slack

    def choose(self, key: PromptKey, loads: Mapping[R, int]) -> R | None:
        """Return the replica for the request with this key, or None if there are no replicas.

        A session's replica is chosen first, then the replica that computed the longest prefix of the prompt, unless
        this replica is too busy. Otherwise a random one of the least busy replicas is chosen. `loads` maps each
        available replica to its number of requests in progress.
        """
        if not loads:
            return None
        pinned = self._owners.get(key.pin) if key.pin else None
        if pinned is not None and pinned in loads:
            return pinned
        low = min(loads.values())
        least = choice([each for each in loads if loads[each] == low])
        for block in reversed(key.blocks):
            owner = self._owners.get(block)
            if owner is not None and owner in loads:
                return owner if loads[owner] <= low + self._slack else least
        return least

    def note(self, key: PromptKey, replica: R) -> None:
        """Remember that this replica computes the request with this key."""
        for block in (key.pin, *key.blocks) if key.pin else key.blocks:
            self._owners[block] = replica
            self._owners.move_to_end(block)
        while len(self._owners) > self._max_hashes:
            self._owners.popitem(last=False)

    def keep(self, replicas: Collection[R]) -> None:
        """Remove all entries of replicas that are not in `replicas`."""
        gone = [block for block, owner in self._owners.items() if owner not in replicas]
        for block in gone:
            del self._owners[block]
