"""Finds stop strings in a text that arrives in pieces."""

from __future__ import annotations


class StopMatcher:
    """Ends a text at the first stop string, however the text is cut into pieces.

    The stop string whose last character comes earliest ends the text. If several end at the same character, the longest
    counts. Therefore the result depends only on the text, and no text is held back longer than necessary. With `keep`,
    the stop string itself stays in the text.
    """

    __slots__ = ("_held", "_initials", "_keep", "_longest", "_matched", "_stops")

    def __init__(self, stops: tuple[str, ...], keep: bool) -> None:
        if not all(stops):
            raise ValueError("a stop string may not be empty")
        self._stops = stops
        self._keep = keep
        self._initials = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return (the text that may be sent now, the stop string that matched or None).

        Text at the end that may begin a stop string is held back. After a match, all further text is dropped.
        """
        if self._matched is not None:
            return "", self._matched
        known = self._held + text
        found = self._first(known)
        if found is not None:
            end, stop = found
            self._matched = stop
            self._held = ""
            return known[: end if self._keep else end - len(stop)], stop
        kept = self._num_held(known)
        self._held = known[len(known) - kept :]
        return known[: len(known) - kept], None

    def flush(self) -> str:
        """Return the text that is still held back. Call it after the last push."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """Return (index after the stop string, stop string) of the match that ends first; None without a match."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                candidate = (start + len(stop), -len(stop), stop)
                best = candidate if best is None else min(best, candidate)
        return None if best is None else (best[0], best[2])

    def _num_held(self, text: str) -> int:
        """Length of the longest suffix of the text that is a prefix of a stop."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._initials:
                tail = text[start:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return len(tail)
        return 0
