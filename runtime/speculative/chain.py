"""Two draft methods in order: prompt lookup where text repeats, otherwise a draft model."""

from __future__ import annotations

from runtime.speculative.model_drafts import DRAFT, ModelDrafter
from runtime.speculative.ngram import NgramDrafter


class ChainDrafter:
    """Proposes the token ids that prompt lookup finds.

    If it finds none, proposes placeholders for the draft model's ids. While draft tokens are in flight, only the draft
    model proposes, because prompt lookup would have to guess how many of them will be accepted. Therefore only the
    oldest draft tokens in flight can come from prompt lookup.
    """

    __slots__ = ("_looked_up", "_model", "lookup")
    by_model = True  # whether the draft model must read the sequence's steps

    def __init__(self, lookup: NgramDrafter, model: ModelDrafter) -> None:
        self.lookup, self._model = lookup, model
        self._looked_up = False  # whether the oldest draft tokens in flight come from prompt lookup

    def propose(self, ids: list[int], num_pending: int, limit: int) -> list[int]:
        """Return up to `limit` ids or placeholders that follow the known `ids` and `num_pending` pending tokens."""
        if num_pending <= 1:  # no draft tokens in flight
            found = self.lookup.propose(ids, num_pending, limit)
            self._looked_up = bool(found)
            if found:
                return found
        return self._model.propose(ids, num_pending, limit)

    def alternatives(self, proposed: list[int]) -> list[tuple[int, list[int]]]:
        """Return alternatives to the proposed draft tokens (see `alternatives` of the two drafters)."""
        drafter = self._model if proposed[0] == DRAFT else self.lookup
        return drafter.alternatives(proposed)

    def note(self, num_proposed: int, num_accepted: int, num_known: int) -> None:
        """Record the result of the oldest proposal in flight.

        `num_known` is the number of known tokens of the sequence.
        """
        drafter = self.lookup if self._looked_up else self._model
        self._looked_up = False
        drafter.note(num_proposed, num_accepted, num_known)
