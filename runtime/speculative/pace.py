"""Decides how many ids prompt lookup proposes next, and when it pauses."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DRAFT = 4  # number of ids in a sequence's first proposal
MAX_PAUSE_BITS = 7  # the longest pause of a sequence whose proposals keep failing is 2**7 tokens


@dataclass(slots=True)
class Pace:
    """The length of a sequence's next proposal, and its pause.

    The length grows while proposals are accepted, and otherwise shrinks to the number of accepted tokens + 1. After
    failures there is a pause, so that text without repetitions is decoded as fast as without draft tokens.
    """

    max_drafts: int
    length: int = FIRST_DRAFT  # maximum number of ids in the next proposal
    num_failures: int = 0  # number of consecutive failures
    resume: int = 0  # sequence length at which the pause ends

    def __post_init__(self) -> None:
        self.length = min(self.length, self.max_drafts)

    def note(self, num_proposed: int, num_accepted: int, num_known: int) -> None:
        """Record the result of a proposal. `num_known` is the number of known tokens of the sequence."""
        if num_accepted == num_proposed:
            self.length = min(2 * num_proposed, self.max_drafts)
        else:
            self.length = max(1, min(num_accepted + 1, self.max_drafts))
        if num_accepted:
            self.num_failures = 0
            return
        self.num_failures += 1
        self.resume = num_known + (1 << min(self.num_failures, MAX_PAUSE_BITS))
