"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the sequence's last n-gram.

Outputs that copy or edit their prompt repeat long parts of it. A step that verifies several tokens takes little longer
than a step that computes one. The index contains only n-grams of the sequence's own prompt and output.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

CATCH_UP_TOKENS = 2048  # maximum number of tokens indexed in one call (about 0.5 ms)
FIRST_DRAFT = 4  # number of ids in a sequence's first proposal
MAX_PAUSE_BITS = 7  # a sequence whose proposals keep failing pauses for up to 2**7 tokens


class NgramDrafter:
    """Proposes draft tokens for one sequence from an index of its n-grams.

    The n-gram sizes are `max_window`, its repeated halves, and `min_window`. The longest n-gram that occurred before is
    used. The proposals grow while they are accepted, and shrink to the number of tokens accepted last + 1.
    They pause after failures, so that text without repetitions is decoded as fast as without draft tokens.
    """

    __slots__ = ("_ends", "_length", "_max_drafts", "_num_failures", "_num_indexed", "_resume", "_sizes")

    def __init__(self, max_drafts: int, min_window: int, max_window: int) -> None:
        self._max_drafts = max_drafts
        sizes = [max_window]
        while sizes[-1] // 2 > min_window:
            sizes.append(sizes[-1] // 2)
        self._sizes = tuple(dict.fromkeys([*sizes, min_window]))  # longest first
        # For each size: n-gram -> position after its last occurrence that a known token follows.
        self._ends: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in self._sizes)
        self._num_indexed = 0  # n-grams that end before this position are indexed
        self._length = min(FIRST_DRAFT, max_drafts)  # length of the next proposal
        self._num_failures = 0  # consecutive failures
        self._resume = 0  # sequence length at which proposals resume

    def propose(self, ids: list[int], num_pending: int, limit: int) -> list[int]:
        """Return up to `limit` ids to follow the known `ids` and `num_pending` pending tokens.

        The list is empty if there is no match. The pending tokens are assumed to be the ones that followed the match.
        """
        if len(ids) < self._resume:
            return []
        self._index(ids)
        if self._num_indexed < len(ids) - 1:
            return []  # a long prompt is not fully indexed yet; the next call continues
        count = num_pending + min(self._length, limit)
        for size, ends in zip(self._sizes, self._ends, strict=True):
            end = ends.get(tuple(ids[-size:]))
            if end is not None:
                continuation = ids[end : end + count]
                while (
                    len(continuation) < count
                ):  # the match overlaps its continuation, so the text repeats with a period
                    continuation += continuation[: count - len(continuation)]
                return continuation[num_pending:]
        return []

    def alternatives(self, proposed: list[int]) -> list[tuple[int, list[int]]]:
        """Return no alternatives."""
        return []

    def note(self, num_proposed: int, num_accepted: int, num_known: int) -> None:
        """Record the result of a proposal. `num_known` is the number of known tokens."""
        if num_accepted == num_proposed:
            self._length = min(2 * num_proposed, self._max_drafts)
        else:
            self._length = max(1, min(num_accepted + 1, self._max_drafts))
        if num_accepted:
            self._num_failures = 0
            return
        self._num_failures += 1
        self._resume = num_known + (1 << min(self._num_failures, MAX_PAUSE_BITS))

    def _index(self, ids: Seq[int]) -> None:
        """Index the n-grams that end before the last known token."""
        first = self._num_indexed
        last = min(len(ids) - 1, first + CATCH_UP_TOKENS)  # the n-grams that end at first + 1 .. last are indexed now
        if last <= first:
            return
        for size, ends in zip(self._sizes, self._ends, strict=True):
            if last < size:
                continue
            begin = max(first + 1 - size, 0)
            part = ids[begin:last]
            grams = zip(*(part[offset:] for offset in range(size)), strict=False)
            ends.update(zip(grams, range(begin + size, last + 1), strict=False))
        self._num_indexed = last
