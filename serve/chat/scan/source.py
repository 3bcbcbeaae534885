"""Text that arrives in pieces, and what readers do with it."""

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
    """Texts to look for. None may begin another, so that a match is certain when it is complete."""

    __slots__ = ("_initials", "_pattern", "_texts", "longest", "or_in_json")

    def __init__(self, texts: tuple[str, ...]) -> None:
        for text in texts:
            if not text or any(other != text and other.startswith(text) for other in texts):
                raise ValueError(f"the mark {text!r} is empty or begins another one")
        self._texts = texts
        self.longest = max(map(len, texts), default=0)
        self._initials = frozenset(text[0] for text in texts)
        self._pattern = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        initials = "".join(map(re.escape, sorted(self._initials)))
        # A character that means something in JSON outside of strings, or that a mark begins with.
        self.or_in_json = re.compile(r'["{}\[\]' + initials + "]")

    def find(self, text: str, start: int, end: int = sys.maxsize) -> re.Match[str] | None:
        """The first mark that stands whole in the text from `start`, and before `end`."""
        return self._pattern.search(text, start, end)

    def at(self, text: str, start: int) -> re.Match[str] | None:
        """The mark that stands at `start`."""
        return self._pattern.match(text, start)

    def may_begin(self, text: str, start: int) -> bool:
        """Whether all that follows from `start` begins a mark without being one."""
        length = len(text) - start
        if length >= self.longest or (length and text[start] not in self._initials):
            return False
        rest = text[start:]
        return any(len(mark) > length and mark.startswith(rest) for mark in self._texts)

    def held_from(self, text: str, start: int) -> int:
        """Where the longest end of the text that begins a mark starts; the text's length if none does."""
        for index in range(max(start, len(text) - self.longest + 1), len(text)):
            if text[index] in self._initials and self.may_begin(text, index):
                return index
        return len(text)


class Source:
    """What has arrived and is not taken yet. Readers yield to wait for more."""

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

    # --- what was taken and may have to be given back as text ---

    def trace(self, *taken: str) -> None:
        """From now on remember what is taken, after `taken`."""
        self._trace = list(taken)

    def traced(self) -> str:
        """What was taken since `trace`; ends it."""
        trace, self._trace = self._trace or [], None
        return "".join(trace)

    # --- reading ---

    def _take(self, end: int) -> str:
        taken = self._text[self._at : end]
        self._at = end
        if self._trace is not None and taken:
            self._trace.append(taken)
        return taken

    def more(self) -> Reader[bool]:
        """Wait for more text; False where the text has ended."""
        if self._final:
            return False
        yield
        return True

    def peek(self) -> Reader[str]:
        """The next character, which stays; empty at the end."""
        while self._at == len(self._text):
            if not (yield from self.more()):
                return ""
        return self._text[self._at]

    def next(self) -> Reader[str]:
        """The next character; empty at the end."""
        found = yield from self.peek()
        self._take(self._at + len(found))
        return found

    def skip(self, *, only_newlines: bool = False) -> Reader[None]:
        """Take white space."""
        pattern = _NOT_NEWLINE if only_newlines else _NOT_SPACE
        while True:
            match = pattern.search(self._text, self._at)
            self._take(match.start() if match else len(self._text))
            if match or not (yield from self.more()):
                return

    def one_of(self, marks: Marks) -> Reader[str | None]:
        """Take the mark that comes next; None, and nothing is taken, where another text does."""
        while True:
            match = marks.at(self._text, self._at)
            if match is not None:
                return self._take(match.end())
            if not marks.may_begin(self._text, self._at) or not (yield from self.more()):
                return None

    def until(self, marks: Marks, sink: Sink) -> Reader[str | None]:
        """Take all up to the next mark, passing it on, and the mark; None where the text ends without one."""
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
        """Take all before the pattern's next match, which is one character, and pass it on. The match stays;
        empty where the text ends before one."""
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
        """Take a short text and the mark that ends it; None where it is longer than `limit` or does not end."""
        pieces: list[str] = []
        taken = 0
        while True:
            # No further than it takes to see that it is too long: each of many beginnings would search all the rest.
            window = self._at + limit - taken + ends.longest
            match = ends.find(self._text, self._at, window)
            if match is not None:
                end = match.start()
            else:
                end = min(ends.held_from(self._text, self._at), window)
            taken += end - self._at
            if taken > limit:  # leave what is too much
                pieces.append(self._take(end - (taken - limit)))
                return None
            pieces.append(self._take(end))
            if match is not None:
                return "".join(pieces), self._take(match.end())
            if not (yield from self.more()):
                return None

    def give_back(self, mark: str) -> None:
        """Undo taking the mark that was taken last."""
        self._at -= len(mark)
        if self._trace:
            self._trace.pop()
