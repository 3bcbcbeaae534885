"""Fair shares of the running rows: each owner (client) gets rows in proportion to the owner's weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping


class OwnerShares:
    """Counts the running sequences of each owner. An owner's share is this count divided by the owner's weight."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        """Create the counts. Owners that are not in `weights` have weight 1."""
        self.counts: Counter[str] = Counter()  # number of running sequences by owner, without zeros
        self._weights = weights

    def enter(self, owner: str) -> None:
        self.counts[owner] += 1

    def leave(self, owner: str) -> None:
        self.counts[owner] -= 1
        if not self.counts[owner]:
            del self.counts[owner]

    def of(self, owner: str, count: int | None = None) -> float:
        """Return the owner's share, or the share that it would have with `count` running sequences."""
        return (self.counts[owner] if count is None else count) / self._weights.get(owner, 1)

    def yields(self, giver: str, taker: str, counts: Mapping[str, int]) -> bool:
        """Return whether `giver` should give a row to `taker`.

        The giver should if its share afterwards is still at least the taker's share. Two owners thus never pass a row
        back and forth. `counts` has the current number of sequences of each owner.
        """
        return self.of(giver, counts.get(giver, 0) - 1) >= self.of(taker, counts.get(taker, 0) + 1)

    def anyone_yields(self, takers: Iterable[str]) -> bool:
        """Return whether at least one owner with running sequences should give a row to one of `takers`."""
        if not self.counts:
            return False
        greatest = max(self.of(giver, count - 1) for giver, count in self.counts.items())
        return any(greatest >= self.of(taker, self.counts[taker] + 1) for taker in takers)
