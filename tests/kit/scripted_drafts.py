"""Drafts under the control of a test: correct up to a position, and wrong from there on."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

from runtime.scheduler.scheduler import Scheduler
from runtime.sequence import Sequence
from runtime.speculative.ngram import LookupSettings, NgramDrafter


class ScriptedDrafter(NgramDrafter):
    """Proposes the sequence's future tokens, with an error at a position that depends on its length."""

    __slots__ = ("_expected", "_limit", "_right", "_sequence", "_vocab_size")

    def __init__(self, sequence: Sequence, expected: list[int], vocab_size: int, limit: int) -> None:
        super().__init__(1, LookupSettings())
        self._right: tuple[int, list[int]] = (0, [])  # place of the first wrong draft, and the right ids there
        self._limit = limit
        self._sequence, self._expected, self._vocab_size = sequence, expected, vocab_size

    def propose(self, ids: list[int], num_pending: int, limit: int) -> list[int]:
        first = len(ids) - self._sequence.num_prompt + num_pending
        chance = crc32(bytes([first % 256, self._sequence.seed % 256, self._sequence.num_prompt % 256]))
        found = self._expected[first : first + min(limit, self._limit, chance % 9)]
        wrong = chance // 8 % 10
        self._right = wrong, found[wrong:][: 1 + chance % 3]
        if wrong < len(found):
            found = [*found[:wrong], *((token + 1) % self._vocab_size for token in found[wrong:])]
        return found

    def alternatives(self, proposed: list[int]) -> list[tuple[int, list[int]]]:
        """Return the right ids in place of the first wrong one, and a wrong branch."""
        wrong, right = self._right
        right = right[: len(proposed) - wrong]
        other = (proposed[0] + 2) % self._vocab_size
        found = [(wrong + 1, right)] if right and wrong < len(proposed) else []
        return found if wrong == 0 else [*found, (1, [other])]


def script_drafts(scheduler: Scheduler, expected: Callable[[Sequence], list[int]], vocab_size: int, limit: int) -> None:
    """Give every sequence that may have drafts a scripted drafter, with up to `limit` ids per row."""
    for sequence in scheduler:
        if isinstance(sequence.drafter, NgramDrafter) and not isinstance(sequence.drafter, ScriptedDrafter):
            sequence.drafter = ScriptedDrafter(sequence, expected(sequence), vocab_size, limit)
