"""How many tokens of an output are reasoning."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate


def tokens_between(
    ids: Sequence[int], token_bytes: Mapping[int, bytes], opening: str, close: str, *, is_open: bool
) -> int:
    """The tokens of the blocks between these marks, with the marks.

    Without encoding anything: a millisecond for each few thousand tokens. `is_open`: the output begins within a block.
    A block that is not closed reaches to the end.
    """
    pieces = [token_bytes[token_id] for token_id in ids]
    ends = list(accumulate(map(len, pieces)))
    whole = b"".join(pieces)
    first, last = opening.encode(), close.encode()
    total = at = 0
    while True:
        if is_open:
            is_open, start, inside = False, 0, 0
        else:
            start = whole.find(first, at)
            if start < 0:
                return total
            inside = start + len(first)
        place = whole.find(last, inside)
        if place < 0:
            return total + len(ids) - bisect_left(ends, start + 1)
        at = place + len(last)
        total += bisect_left(ends, at) + 1 - bisect_left(ends, start + 1)
