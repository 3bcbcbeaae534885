"""JSON as it comes: values are passed on as they were written, only strings and braces are followed.

What JSON does not allow in a string and models write all the same becomes an escape, so that a client can read it.
"""

from __future__ import annotations

import json
import re

from serve.chat.scan.source import Marks, Reader, Sink, Source

MAX_NAME_CHARS = 256

_IN_STRING = re.compile(r'["\\]')
_CONTROL = re.compile(r"[\x00-\x1f]")
_ESCAPES = frozenset('"\\/bfnrtu')
_AFTER_SCALAR = re.compile(r"[\s,;}\]<\[|]")
_OPENING, _CLOSING = "{[", "}]"
NO_MARKS = Marks(())


def read_value(source: Source, sink: Sink, ends: Marks = NO_MARKS) -> Reader[bool]:
    """Pass on one value, whose first character is next. False where the text ends within it, or where one of `ends`
    stands in it outside of strings: then it is malformed, and the mark is left."""
    first = yield from source.peek()
    if first == '"':
        return (yield from read_string(source, sink))
    if first not in _OPENING or not first:
        yield from source.while_in(_AFTER_SCALAR, sink)
        return True
    pattern = ends.or_in_json
    depth = 0
    while True:
        found = yield from source.while_in(pattern, sink)
        if not found:
            return False
        if found == '"':
            if not (yield from read_string(source, sink)):
                return False
            continue
        if found not in _OPENING + _CLOSING:
            mark = yield from source.one_of(ends)
            if mark is not None:
                source.give_back(mark)
                return False
        sink((yield from source.next()))
        depth += (found in _OPENING) - (found in _CLOSING)
        if depth == 0 and found in _CLOSING:
            return True


def read_string(source: Source, sink: Sink) -> Reader[bool]:
    """Pass on one string with its quotes; False where the text ends within it."""
    sink((yield from source.next()))
    while True:
        found = yield from source.while_in(_IN_STRING, lambda text: sink(_CONTROL.sub(_spelled, text)))
        if not found:
            return False
        mark = yield from source.next()
        if found == '"':
            sink(mark)
            return True
        escaped = yield from source.next()
        if escaped in _ESCAPES:
            sink(mark + escaped)
        elif escaped == "'":
            sink(escaped)
        else:
            sink(_CONTROL.sub(_spelled, escaped) if _CONTROL.match(escaped) else mark + mark + escaped)
        if not escaped:
            return False


def _spelled(control: re.Match[str]) -> str:
    return quoted(control[0])


def short_string(source: Source) -> Reader[str | None]:
    """The value of a short string, such as a name; None where it is none."""
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
    """Whether it can be sent: escapes in JSON may name half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def quoted(text: str) -> str:
    """As the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
