"""Draft tokens from external corpora: the tokens that follow a sequence's last tokens in texts that were added."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.speculative.match_odds import MatchOdds

LENGTHS = (8, 5, 3)  # lengths of the n-grams that are looked up
SEPARATOR = -1  # follows the last token of each document
_FACTOR, _MASK = 0x9E3779B97F4A7C15, 2**64 - 1
Tokens = NDArray[np.int32]


class CorpusIndex:
    """All n-grams of the corpora, of the lengths in `LENGTHS`, with the position of the last occurrence of each.

    Immutable. Takes up to 40 bytes per token. A lookup takes a few microseconds, for any number of corpora.
    """

    __slots__ = ("_tables", "_tokens")

    def __init__(self, corpora: Sequence[Tokens]) -> None:
        """Index `corpora`: int32 (tokens), with `SEPARATOR` after each document. Takes 0.5 s per million tokens."""
        self._tokens = np.concatenate(corpora)
        self._tables = [(length, *_table(self._tokens, length)) for length in LENGTHS]

    def find(self, ids: list[int], above: int) -> tuple[int, int]:
        """Return (length of the longest n-gram of the last ids that is in a corpus, position after its occurrence).

        Only n-grams longer than `above` are looked up. Returns (0, 0) if none is found.
        """
        for length, hashes, ends in self._tables:
            if length <= above:
                break
            last, value = ids[-length:], 0
            for each in last:
                value = (value * _FACTOR + each) & _MASK
            place = int(hashes.searchsorted(np.uint64(value)))
            if place < len(hashes):
                end = int(ends[place])
                if self._tokens[end - length : end].tolist() == last:
                    return length, end
        return 0, 0

    def after(self, position: int, count: int) -> list[int]:
        """Return up to `count` tokens at `position` and after it, up to the end of the document."""
        found: list[int] = self._tokens[position : position + count].tolist()
        return found[: found.index(SEPARATOR)] if SEPARATOR in found else found


class CorpusLookup:
    """The corpora in which the drafters of a scheduler look up n-grams, and statistics of the proposals."""

    __slots__ = ("index", "odds")

    def __init__(self, odds: MatchOdds | None = None) -> None:
        self.index: CorpusIndex | None = None  # None: there are no corpora
        self.odds = odds  # None: ids are proposed after every match

    def propose(self, ids: list[int], above: int, num_pending: int, count: int) -> tuple[int, list[int]]:
        """Return (length of the match, up to `num_pending + count` ids that follow `ids`), or (0, []).

        A match must be longer than `above`, and more than `num_pending` ids must follow it.
        """
        if self.index is None:
            return 0, []
        length, position = self.index.find(ids, above)
        if not length or (self.odds is not None and not self.odds.pays(length)):
            return 0, []
        found = self.index.after(position, num_pending + count)
        return (length, found) if len(found) > num_pending else (0, [])


def _table(tokens: Tokens, length: int) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
    """Return the sorted hashes of the n-grams of this length, and the position after each n-gram's last occurrence.

    N-grams at the end of a document are left out, because no token follows them.
    """
    ends = np.flatnonzero(tokens[length:] >= 0) + length
    hashes = np.zeros(max(len(tokens) - length, 0), np.uint64)
    for offset in range(length if len(hashes) else 0):
        hashes *= np.uint64(_FACTOR)
        hashes += tokens[offset : offset + len(hashes)].astype(np.uint64)
    hashes = hashes[ends - length]
    order = np.argsort(hashes, kind="stable")
    hashes, is_last = hashes[order], np.ones(len(order), np.bool_)
    is_last[:-1] = hashes[1:] != hashes[:-1]
    return hashes[is_last], ends[order[is_last]].astype(np.int32)
