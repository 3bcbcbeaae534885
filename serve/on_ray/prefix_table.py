"""A table of the replicas that computed recent prompts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Generic, TypeVar

R = TypeVar("R")

MAX_HASHES = 500_000  # number of hashes that the table remembers, in about 100 MB
SLACK = 4  # requests that the replica with the prefix may have more than the least busy replica


class PrefixTable(Generic[R]):
    """Remembers the last replica of each block of a prompt (`prompt_key`), to choose replicas for later prompts."""

    def __init__(self, max_hashes: int = MAX_HASHES, slack: int = SLACK) -> None:
        self._owners: OrderedDict[int, R] = OrderedDict()
        self._max_hashes = max_hashes
        self._slack = slack

    def choose(self, key: Sequence[int], loads: Mapping[R, int]) -> R | None:
        """Return the replica that computed the longest prefix of this prompt.

        Return the least busy replica if none computed a prefix, or if that replica is too busy. Return None if there
        are no replicas. `loads` maps the available replicas to their requests in progress.
        """
        if not loads:
            return None
        least = min(loads, key=loads.__getitem__)
        for block in reversed(key):
            owner = self._owners.get(block)
            if owner is not None and owner in loads:
                return owner if loads[owner] <= loads[least] + self._slack else least
        return least

    def note(self, key: Sequence[int], replica: R) -> None:
        """Remember that this replica computes a prompt."""
        for block in key:
            self._owners[block] = replica
            self._owners.move_to_end(block)
        while len(self._owners) > self._max_hashes:
            self._owners.popitem(last=False)

    def keep(self, replicas: Collection[R]) -> None:
        """Forget all replicas except these."""
        gone = [block for block, owner in self._owners.items() if owner not in replicas]
        for block in gone:
            del self._owners[block]
