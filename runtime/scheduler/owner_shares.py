"""The rows of the owners (clients) that have requests, in proportion to their weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


class OwnerShares:
    """Counts the running sequences of each owner, and compares owners by this number divided by their weights."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Owners that are not in `weights` have weight 1."""
        self.counts: Counter[str] = Counter()  # number of running sequences by owner; owners with none are left out
        self._weights = weights

    def enter(self, owner: str) -> None:
        self.counts[owner] += 1

    def leave(self, owner: str) -> None:
        self.counts[owner] -= 1
        if not self.counts[owner]:
            del self.counts[owner]

    def of(self, owner: str, count: int | None = None) -> float:
        """Return the owner's number of running sequences, or `count`, divided by its weight."""
        return (self.counts[owner] if count is None else count) / self._weights.get(owner, 1)

    def yields(self, giver: str, taker: str, counts: Mapping[str, int]) -> bool:
        """Return whether one owner gives a row to another one. `counts` are the numbers of sequences before.

        The giver has at least the taker's share afterwards, so two owners never give a row to and fro.
        """
        return self.of(giver, counts.get(giver, 0) - 1) >= self.of(taker, counts.get(taker, 0) + 1)

    def anyone_yields(self, takers: Iterable[str]) -> bool:
        """Return whether a running owner gives a row to one of these owners."""
        if not self.counts:
            return False
        greatest = max(self.of(giver, count - 1) for giver, count in self.counts.items())
        return any(greatest >= self.of(taker, self.counts[taker] + 1) for taker in takers)
