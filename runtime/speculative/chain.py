"""Two draft methods in order: prompt lookup where text repeats, and a model elsewhere."""

from __future__ import annotations

from runtime.speculative.model_drafts import DRAFT, ModelDrafter
from runtime.speculative.ngram import NgramDrafter


class ChainDrafter:
    """Proposes the ids that prompt lookup finds. If it finds none, proposes placeholders for ids of the draft model.

    While drafts are in flight, only the model proposes, because prompt lookup would have to guess how many of them are
    accepted. Therefore only the oldest drafts in flight can come from prompt lookup.
    """

    __slots__ = ("_looked_up", "_lookup", "_model")

    def __init__(self, lookup: NgramDrafter, model: ModelDrafter) -> None:
        self._lookup, self._model = lookup, model
        self._looked_up = False  # whether the oldest drafts in flight come from prompt lookup

    def propose(self, ids: list[int], num_pending: int, limit: int) -> list[int]:
        """Return up to `limit` ids or placeholders that may follow the known `ids` and `num_pending` tokens."""
        if num_pending <= 1:  # no drafts in flight
            found = self._lookup.propose(ids, num_pending, limit)
            self._looked_up = bool(found)
            if found:
                return found
        return self._model.propose(ids, num_pending, limit)

    def alternatives(self, proposed: list[int]) -> list[tuple[int, list[int]]]:
        """Return the alternatives to proposed drafts; see the drafters."""
        drafter = self._model if proposed[0] == DRAFT else self._lookup
        return drafter.alternatives(proposed)

    def note(self, num_proposed: int, num_accepted: int, num_known: int) -> None:
        """Record the result of the oldest proposal. `num_known` is the number of known tokens."""
        drafter = self._lookup if self._looked_up else self._model
        self._looked_up = False
        drafter.note(num_proposed, num_accepted, num_known)
