"""Find stop strings and stop patterns in a text that arrives in pieces."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

# Maximum length of a match of a stop pattern. It bounds the text that a stream holds back.
MAX_PATTERN_CHARS = 1024


@dataclass(frozen=True, slots=True)
class StopPattern:
    """A deterministic automaton that starts in state 0. A text is a match if it ends in an accepting state."""

    text: str  # the regular expression
    starts: tuple[int, ...]  # first code point of each character range, ascending
    classes: tuple[int, ...]  # class of each character range
    next: tuple[tuple[int, ...], ...]  # next[state][class] is the next state; -1: no match is possible
    accepts: tuple[bool, ...]

    def class_of(self, character: str) -> int:
        return self.classes[bisect_right(self.starts, ord(character)) - 1]


class _PatternScan:
    """Searches one text for the match of a pattern that ends first. Of several such matches, the longest counts."""

    __slots__ = ("_begins", "pattern")

    def __init__(self, pattern: StopPattern) -> None:
        self.pattern = pattern
        self._begins: dict[int, int] = {}  # active state -> earliest index at which a match in this state begins

    def scan(self, text: str, new_from: int) -> tuple[int, int] | None:
        """Read the characters of `text` from index `new_from` on. Return (begin, end) of the first match, or None."""
        for at in range(new_from, len(text)):
            kind = self.pattern.class_of(text[at])
            earlier, self._begins = self._begins, {}
            earlier.setdefault(0, at)
            matched: int | None = None
            for state, begin in earlier.items():
                following = self.pattern.next[state][kind]
                if following < 0 or at + 1 - begin > MAX_PATTERN_CHARS:
                    continue
                if begin < self._begins.get(following, len(text)):
                    self._begins[following] = begin
                if self.pattern.accepts[following]:
                    matched = begin if matched is None else min(matched, begin)
            if matched is not None:
                return matched, at + 1
        return None

    def begin(self, end: int) -> int:
        """Return the earliest index at which an unfinished match begins, or `end` if there is none."""
        return min(self._begins.values(), default=end)

    def drop(self, count: int) -> None:
        """Shift all indices after the first `count` characters have been sent."""
        self._begins = {state: begin - count for state, begin in self._begins.items()}


class StopMatcher:
    """Ends a text at the first stop string or stop pattern.

    The first stop is the one whose last character comes earliest; if several end at the same character, it is the
    longest. Therefore the result does not depend on how the text is cut into pieces, and no text is held back longer
    than necessary. With `keep`, the stop itself stays in the text.
    """

    __slots__ = ("_held", "_initials", "_keep", "_longest", "_matched", "_scans", "_stops")

    def __init__(self, stops: tuple[str, ...], keep: bool, patterns: Sequence[StopPattern] = ()) -> None:
        if not all(stops):
            raise ValueError("a stop string may not be empty")
        self._stops = stops
        self._keep = keep
        self._initials = frozenset(stop[0] for stop in stops)
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self._matched: str | None = None
        self._scans = [_PatternScan(pattern) for pattern in patterns]

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that may be sent now, and the stop string or pattern that matched, or None.

        Text at the end that may be the beginning of a stop is held back. After a match, all further text is dropped.
        """
        if self._matched is not None:
            return "", self._matched
        known = self._held + text
        found = self._first(known, len(self._held))
        if found is not None:
            end, begin, stop = found
            self._matched = stop
            self._held = ""
            return known[: end if self._keep else begin], stop
        sent = len(known) - self._num_held(known)
        if self._scans:
            sent = min(sent, *(scan.begin(len(known)) for scan in self._scans))
            for scan in self._scans:
                scan.drop(sent)
        self._held = known[sent:]
        return known[:sent], None

    def flush(self) -> str:
        """Return the text that is still held back. Call it after the last push."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str, new_from: int) -> tuple[int, int, str] | None:
        """Return (end, begin, stop) of the first match, or None."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0:
                candidate = (start + len(stop), start, stop)
                best = candidate if best is None else min(best, candidate)
        for scan in self._scans:
            match = scan.scan(text, new_from)
            if match is not None:
                candidate = (match[1], match[0], scan.pattern.text)
                best = candidate if best is None else min(best, candidate)
        return best

    def _num_held(self, text: str) -> int:
        """Return the length of the longest suffix of the text that is a prefix of a stop string."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._initials:
                tail = text[start:]
                if any(stop.startswith(tail) for stop in self._stops):
                    return len(tail)
        return 0
