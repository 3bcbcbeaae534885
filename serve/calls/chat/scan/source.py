"""Text that arrives in pieces, and the operations by which readers consume it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reader = Generator[None, None, T]
Sink = Callable[[str], None]

_NOT_SPACE = re.compile(r"\S")
_NOT_NEWLINE = re.compile(r"[^\n]")


class Marks:
    """A set of marks, which are delimiter texts such as <tool_call>, to search for.

    Raises `ValueError` if one text is a prefix of another: a complete match is then final.
    """

    __slots__ = ("_initials", "_pattern", "_texts", "longest")

    def __init__(self, texts: tuple[str, ...]) -> None:
        for text in texts:
            if not text or any(other != text and other.startswith(text) for other in texts):
                raise ValueError(f"the mark {text!r} is empty or a prefix of another mark")
        self._texts = texts
        self.longest = max(map(len, texts), default=0)
        self._initials = frozenset(text[0] for text in texts)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")

    def find(self, text: str, start: int, end: int = sys.maxsize) -> re.Match[str] | None:
        """Return the match of the first complete mark in the text between `start` and `end`, or None."""
        return self._pattern.search(text, start, end)

    def at(self, text: str, start: int) -> re.Match[str] | None:
        """Return the match of a mark that begins at `start`, or None."""
        return self._pattern.match(text, start)

    def may_begin(self, text: str, start: int) -> bool:
        """Whether the text from `start` on is a proper prefix of a mark."""
        length = len(text) - start
        if length >= self.longest or (length and text[start] not in self._initials):
            return False
        rest = text[start:]
        return any(len(mark) > length and mark.startswith(rest) for mark in self._texts)

    def held_from(self, text: str, start: int) -> int:
        """Return the first index from which the rest of the text is the beginning of a mark.

        Return the length of the text if there is no such index.
        """
        for index in range(max(start, len(text) - self.longest + 1), len(text)):
            if text[index] in self._initials and self.may_begin(text, index):
                return index
        return len(text)


class Source:
    """The text that has arrived and is not yet consumed. A reader yields to wait for more text."""

    __slots__ = ("_at", "_final", "_text", "_trace")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._final = False
        self._trace: list[str] | None = None

    def add(self, text: str, *, final: bool) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0
        self._final = final

    # --- the trace: a record of consumed text, which becomes content if it turns out to be no call or mark ---

    def trace(self, *prefix: str) -> None:
        """Start to record consumed text. The record begins with `prefix`, which has already been consumed."""
        self._trace = list(prefix)

    def traced(self) -> str:
        """Return the recorded text, and stop recording."""
        trace, self._trace = self._trace or [], None
        return "".join(trace)

    # --- reading ---

    def _take(self, end: int) -> str:
        consumed = self._text[self._at : end]
        self._at = end
        if self._trace is not None and consumed:
            self._trace.append(consumed)
        return consumed

    def more(self) -> Reader[bool]:
        """Wait for more text. Return False at the end of the text."""
        if self._final:
            return False
        yield
        return True

    def peek(self) -> Reader[str]:
        """Return the next character without consuming it. Returns an empty string at the end of the text."""
        while self._at == len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self._at]

    def next(self) -> Reader[str]:
        """Consume and return the next character. Returns an empty string at the end of the text."""
        char = yield from self.peek()
        self._take(self._at + len(char))
        return char

    def skip(self, *, only_newlines: bool = False) -> Reader[None]:
        """Consume white space, or only line breaks if `only_newlines` is true."""
        pattern = _NOT_NEWLINE if only_newlines else _NOT_SPACE
        while True:
            match = pattern.search(self._text, self._at)
            self._take(match.start() if match else len(self._text))
            if match or not (yield from self.more()):
                return

    def one_of(self, marks: Marks) -> Reader[str | None]:
        """Consume the mark that comes next. Return None, and consume nothing, if other text comes next."""
        while True:
            match = marks.at(self._text, self._at)
            if match is not None:
                return self._take(match.end())
            if not marks.may_begin(self._text, self._at) or not (yield from self.more()):
                return None

    def until(self, marks: Marks, sink: Sink) -> Reader[str | None]:
        """Pass the text before the next mark to the sink, then consume and return the mark.

        Return None if the text ends without a mark.
        """
        while True:
            match = marks.find(self._text, self._at)
            end = match.start() if match else marks.held_from(self._text, self._at)
            if self._final and match is None:
                end = len(self._text)
            if end > self._at:
                sink(self._take(end))
            if match is not None:
                return self._take(match.end())
            if not (yield from self.more()):
                return None

    def while_in(self, pattern: re.Pattern[str], sink: Sink) -> Reader[str]:
        """Pass the text before the pattern's next match to the sink, and return the match without consuming it.

        The pattern must match single characters. Returns an empty string if the text ends without a match.
        """
        while True:
            match = pattern.search(self._text, self._at)
            end = match.start() if match else len(self._text)
            if end > self._at:
                sink(self._take(end))
            if match is not None:
                return match.group()
            if not (yield from self.more()):
                return ""

    def short(self, ends: Marks, limit: int) -> Reader[tuple[str, str] | None]:
        """Consume and return the text up to a mark, and the mark.

        Return None if the text is longer than `limit` or no mark follows.
        """
        pieces: list[str] = []
        num_chars = 0
        while True:
            # The search stops at the limit, so that an output with many beginnings of calls takes linear time.
            window = self._at + limit - num_chars + ends.longest
            match = ends.find(self._text, self._at, window)
            if match is not None:
                end = match.start()
            else:
                end = min(ends.held_from(self._text, self._at), window)
            num_chars += end - self._at
            if num_chars > limit:  # leave the text beyond the limit in the source
                pieces.append(self._take(end - (num_chars - limit)))
                return None
            pieces.append(self._take(end))
            if match is not None:
                return "".join(pieces), self._take(match.end())
            if not (yield from self.more()):
                return None

    def give_back(self, mark: str) -> None:
        """Put back the mark that was consumed last."""
        self._at -= len(mark)
        if self._trace:
            self._trace.pop()
