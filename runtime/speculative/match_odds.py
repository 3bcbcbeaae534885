"""Decides after which matches prompt lookup proposes draft tokens: after lengths of matches that paid off so far."""

from __future__ import annotations

from dataclasses import dataclass

TRIES = 4  # number of proposals of each length before its average counts
MEMORY = 16  # number of proposals over which the average is taken
FIRST_PAUSE, LONGEST_PAUSE = 32, 2048  # shortest and longest pause of a length, in matches without a proposal


@dataclass(slots=True)
class _Length:
    """The results of proposals after matches of one length."""

    accepted: float = 0.0  # average number of accepted ids
    count: int = 0  # number of proposals in the average
    pause: int = FIRST_PAUSE
    num_skipped: int = 0  # matches without a proposal since the last proposal
    is_retry: bool = False  # whether the last proposal ended a pause


class MatchOdds:
    """The average number of ids that were accepted after matches of each length, over all sequences of a scheduler.

    Long matches are usually right, and short ones are usually chance, but this depends on the requests. A length whose
    average is below `cost` pauses, and is then tried again. If this fails too, the next pause is twice as long.
    """

    __slots__ = ("_lengths", "cost")

    def __init__(self, max_length: int) -> None:
        # Number of ids that must be accepted to make a proposal worth its time. None: unknown.
        self.cost: float | None = None
        self._lengths = [_Length() for _ in range(max_length + 1)]

    def pays(self, length: int) -> bool:
        """Return whether to propose ids after a match of this length."""
        own = self._lengths[length]
        if self.cost is None or own.count < TRIES or own.accepted > self.cost:
            return True
        own.num_skipped += 1
        return own.num_skipped >= own.pause

    def begin(self, length: int) -> None:
        """Record that ids are proposed after a match of this length. This ends its pause, if `pays` has allowed it."""
        own = self._lengths[length]
        if own.num_skipped >= own.pause:
            own.num_skipped, own.is_retry = 0, True

    def note(self, length: int, num_accepted: int) -> None:
        """Record the result of a proposal after a match of this length."""
        own = self._lengths[length]
        if own.is_retry:
            own.is_retry = False
            if self.cost is not None and num_accepted > self.cost:  # the requests have changed
                own.accepted, own.count, own.pause = num_accepted, TRIES, FIRST_PAUSE
                return
            own.pause = min(2 * own.pause, LONGEST_PAUSE)
        own.count = min(own.count + 1, MEMORY)
        own.accepted += (num_accepted - own.accepted) / own.count
