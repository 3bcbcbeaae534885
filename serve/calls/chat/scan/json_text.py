"""Copy JSON from a `Source` to a sink as it arrives, and correct typical mistakes of models.

Control characters in strings become escapes, bare words become strings, and missing or superfluous brackets, commas and
colons are added or dropped.
"""

from __future__ import annotations

import json
import re

from serve.calls.chat.scan.source import Marks, Reader, Sink, Source

MAX_NAME_CHARS = 256

_IN_STRING = re.compile(r'["\\]')
_CONTROL = re.compile(r"[\x00-\x1f]")
_ESCAPES = frozenset('"\\/bfnrtu')
_AFTER_SCALAR = re.compile(r"[\s,;}\]<\[|]")
_NOT_SPACE = re.compile(r"\S")
_AFTER_KEY = re.compile(r'[:,{}\[\]"\n<|`]')
_AFTER_WORD = re.compile(r'[,{}\[\]"\n<|`]')
_SCALAR = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null")
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_CLOSER = {"{": "}", "[": "]"}
NO_MARKS = Marks(())


def read_value(source: Source, sink: Sink, ends: Marks = NO_MARKS) -> Reader[bool]:
    """Copy one JSON value, which begins at the source's next character, to the sink.

    Return False if the text ends inside the value. If one of `ends` occurs in an object or list, outside strings, the
    missing brackets are written, and the mark stays in the source.
    """
    first = yield from source.peek()
    if first == '"':
        return (yield from read_string(source, sink))
    if first not in _CLOSER:
        yield from source.while_in(_AFTER_SCALAR, sink)
        return True
    structure = _Structure(sink)
    while True:
        char = yield from source.while_in(_NOT_SPACE, structure.space)
        if not char:
            return False
        if (yield from _is_at(source, ends)):
            structure.close_all()
            return True
        if char == '"':
            structure.item()
            if not (yield from read_string(source, sink)):
                return False
        elif char in "{[}],:":
            yield from source.next()
            structure.punctuation(char)
            if structure.is_complete:
                return True
        elif not (yield from _read_word(source, structure, ends)):
            return False


def _is_at(source: Source, ends: Marks) -> Reader[bool]:
    mark = yield from source.one_of(ends)
    if mark is not None:
        source.give_back(mark)
    return mark is not None


def _read_word(source: Source, structure: _Structure, ends: Marks) -> Reader[bool]:
    """Copy a word outside strings, corrected to valid JSON. Return False if the text ends inside the word."""
    pattern = _AFTER_KEY if structure.expects_key else _AFTER_WORD
    pieces: list[str] = []
    while True:
        char = yield from source.while_in(pattern, pieces.append)
        if not char:
            structure.write("".join(pieces))  # the word is incomplete, so it is not corrected
            return False
        if char not in "<|`" or (yield from _is_at(source, ends)):
            break
        pieces.append((yield from source.next()))
    text = "".join(pieces)
    word = text.rstrip()
    is_key = structure.expects_key
    word = _PYTHON_WORDS.get(word, word)
    structure.write(word if _SCALAR.fullmatch(word) and not is_key else f'"{quoted(word)}"')
    structure.space(text[len(text.rstrip()) :])
    return True


class _Structure:
    """Writes the brackets, commas and colons of one object or list so that the result is valid JSON."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._closers: list[str] = []  # closing brackets of the open brackets
        self._last = ""  # the last bracket, comma or colon, or "key" or "value" after a key or value
        self._comma: list[str] | None = None  # a comma and the white space after it, not written until an item follows

    @property
    def is_complete(self) -> bool:
        return not self._closers

    @property
    def expects_key(self) -> bool:
        return self._closers[-1:] == ["}"] and self._last not in ("key", ":")

    def space(self, text: str) -> None:
        (self._sink if self._comma is None else self._comma.append)(text)

    def write(self, text: str) -> None:
        """Write a complete string, number or word."""
        self.item()
        self._sink(text)

    def item(self) -> None:
        """Write the missing separator before a key or value. The caller then writes the key or value."""
        if self._last == "value" and self._comma is None:
            self._sink(", ")
        elif self._last == "key":
            self._sink(": ")
        if self._comma is not None:
            self._sink("".join(self._comma))
            self._comma = None
        self._last = "key" if self.expects_key else "value"

    def punctuation(self, char: str) -> None:
        if char in _CLOSER:
            if self.expects_key and self._closers:
                self.write('""')
            self.item()
            self._sink(char)
            self._closers.append(_CLOSER[char])
            self._last = char
        elif char == ":":
            if self._last == "key":
                self._sink(char)
                self._last = char
        else:
            self._complete_member()
            if char != ",":
                self._comma = None
                self._sink(self._closers.pop())
                self._last = "value"
            elif self._last == "value" and self._comma is None:
                self._comma = [char]

    def close_all(self) -> None:
        self._complete_member()
        self._comma = None
        self._sink("".join(reversed(self._closers)))

    def _complete_member(self) -> None:
        if self._last in ("key", ":"):
            self._sink("null" if self._last == ":" else ": null")
            self._last = "value"


def read_string(source: Source, sink: Sink) -> Reader[bool]:
    """Copy one string with its quotes to the sink. Return False if the text ends inside the string."""
    sink((yield from source.next()))
    while True:
        char = yield from source.while_in(_IN_STRING, lambda text: sink(_CONTROL.sub(_escaped_control, text)))
        if not char:
            return False
        mark = yield from source.next()
        if char == '"':
            sink(mark)
            return True
        escaped = yield from source.next()
        if escaped in _ESCAPES:
            sink(mark + escaped)
        elif escaped == "'":
            sink(escaped)
        else:
            sink(_CONTROL.sub(_escaped_control, escaped) if _CONTROL.match(escaped) else mark + mark + escaped)
        if not escaped:
            return False


def _escaped_control(control: re.Match[str]) -> str:
    return quoted(control[0])


def short_string(source: Source) -> Reader[str | None]:
    """Return the value of a short string, such as a name, or None if the next value is something else."""
    if (yield from source.peek()) != '"':
        return None
    pieces: list[str] = []
    if not (yield from read_string(source, pieces.append)):
        return None
    text = "".join(pieces)
    if len(text) > MAX_NAME_CHARS:
        return None
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if is_unicode(value) else None


def is_unicode(text: str) -> bool:
    """Whether the text can be encoded in UTF-8. A JSON escape for half a surrogate pair makes this impossible."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def quoted(text: str) -> str:
    """Return the text as a JSON string without its quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
