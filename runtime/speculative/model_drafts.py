"""Chooses how many tokens a draft model proposes (the `STANDALONE` method; Leviathan et al., arXiv 2211.17192)."""

from __future__ import annotations

DRAFT = -2  # placeholder for a draft token, whose id the draft model proposes in the step that verifies it
LEAST_RATE = 0.3  # if a smaller share of first draft tokens is accepted, draft tokens do not pay off
MEMORY = 8  # number of rows over which this share is averaged
FIRST_PAUSE, LONGEST_PAUSE = 8, 128  # shortest and longest pause, in tokens


class ModelDrafter:
    """Chooses how many ids the draft model proposes for one sequence.

    Proposes placeholders, because only the device knows the ids. The number grows by one if all ids are accepted. If
    most are rejected, it falls to the number of accepted ids + 1. If the first id is rejected too often, there is a
    pause without draft tokens. Each further pause is twice as long.
    """

    __slots__ = ("_length", "_max_drafts", "_max_tree", "_pause", "_rate", "_resume", "_topk")
    by_model = True  # whether the draft model must read the sequence's steps

    def __init__(self, max_drafts: int, topk: int = 1, max_tree: int = 0) -> None:
        """Create the drafter. `topk` is the number of alternatives for each draft token.

        A draft tree has up to `max_tree` ids in total.
        """
        self._max_drafts = self._length = max_drafts
        self._topk, self._max_tree = topk, max_tree
        self._rate = 1.0  # average share of rows whose first draft token was accepted
        self._pause = FIRST_PAUSE
        self._resume = 0  # number of known tokens at which the pause ends

    def propose(self, ids: list[int], num_pending: int, limit: int) -> list[int]:
        """Return a placeholder for each proposed id. There are at most `limit`."""
        return [DRAFT] * min(self._length, limit) if len(ids) >= self._resume else []

    def alternatives(self, proposed: list[int]) -> list[tuple[int, list[int]]]:
        """Return (number of the replaced draft token, placeholder) for each alternative to the proposed draft tokens.

        Likelier alternatives come first.
        """
        count = len(proposed)
        places = [(depth, [DRAFT]) for _ in range(1, self._topk) for depth in range(1, count + 1)]
        return places[: max(self._max_tree - count, 0)]

    def note(self, num_proposed: int, num_accepted: int, num_known: int) -> None:
        """Record the result of a proposal. `num_known` is the number of known tokens of the sequence."""
        if num_accepted == num_proposed:
            self._length = min(num_proposed + 1, self._max_drafts)
        elif 2 * num_accepted < num_proposed:
            self._length = max(1, min(self._length, num_accepted + 1))
        self._rate += ((num_accepted > 0) - self._rate) / MEMORY
        if self._rate < LEAST_RATE:
            self._rate, self._length = 2 * LEAST_RATE, 1
            self._resume = num_known + self._pause
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
