"""Reader of calls in Python syntax, for example [find(city="Paris", limit=3), stop()]."""

from __future__ import annotations

import re
from collections.abc import Callable

from serve.calls.chat.scan.json_text import MAX_NAME_CHARS, quoted
from serve.calls.chat.scan.source import Marks, Reader, Source
from serve.calls.chat.tools.format import CallContext, CallReader
from serve.calls.chat.tools.json_calls import leave

MAX_DEPTH = 32

_LIST, _LIST_END = Marks(("[",)), Marks(("]",))
_PAREN, _PAREN_END = Marks(("(",)), Marks((")",))
_EQUALS, _COMMA, _COLON = Marks(("=",)), Marks((",",)), Marks((":",))
_NAME = re.compile(r"[A-Za-z_][\w.:-]{0,127}")
_AFTER_WORD = re.compile(r"[\s,()\[\]{}=:\"'<|]")
NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}
_AFTER_STRING = ",)]}:"
_QUOTED = {quote: re.compile(rf"[\\{quote}]") for quote in "\"'"}


def python_calls(*, brackets: bool = True, only_offered: bool = True) -> CallReader:
    """Return a reader of calls in Python syntax.

    `brackets`: the calls are in a list whose opening bracket is already consumed. If false, the brackets and the commas
    between calls are optional. `only_offered`: a call must name a tool of the request.
    """

    def read(context: CallContext) -> Reader[bool]:
        source = context.source
        if not brackets:
            yield from source.skip()
            yield from source.one_of(_LIST)
        if not (yield from _call(context, only_offered=only_offered)):
            return False
        while True:
            source.trace()
            yield from source.skip()
            if (yield from source.one_of(_LIST_END)) is not None:
                source.traced()
                return True
            has_comma = (yield from source.one_of(_COMMA)) is not None
            continues = has_comma or (not brackets and (yield from source.peek()).isidentifier())
            if not continues or not (yield from _call(context, only_offered=only_offered)):
                yield from leave(context, source.traced())
                return True

    return read


def _call(context: CallContext, *, only_offered: bool) -> Reader[bool]:
    """Read NAME(key=value, ...). Return False, and write nothing, if the text is not a call."""
    source, output = context.source, context.output
    yield from source.skip()
    name = yield from _word(source)
    if _NAME.fullmatch(name) is None or (only_offered and name not in context.tools):
        return False
    if (yield from source.one_of(_PAREN)) is None:
        return False
    source.traced()
    output.start(name)
    before = "{"
    while True:
        source.trace()
        yield from source.skip()
        if (yield from source.one_of(_COMMA)) is not None:
            continue
        if (yield from source.one_of(_PAREN_END)) is not None:
            output.arguments("{}" if before == "{" else "}")
            source.traced()
            return True
        key = yield from _word(source)
        yield from source.skip()
        if not key or (yield from source.one_of(_EQUALS)) is None:
            return (yield from _end_malformed_call(context, "{}" if before == "{" else "}"))
        source.traced()
        output.arguments(f'{before}"{quoted(key)}": ')
        before = ", "
        yield from source.skip()
        if not (yield from _value(context, MAX_DEPTH)):
            return True


def _end_malformed_call(context: CallContext, closing: str) -> Reader[bool]:
    """End a malformed call. The text consumed since its last valid argument becomes content."""
    if (yield from context.source.peek()):
        context.output.arguments(closing)
    yield from leave(context, context.source.traced())
    return True


def _word(source: Source) -> Reader[str]:
    """Read up to white space or punctuation, at most `MAX_NAME_CHARS` characters."""
    pieces: list[str] = []
    num_chars = 0
    while True:
        letter = yield from source.peek()
        if not letter or _AFTER_WORD.match(letter) or num_chars == MAX_NAME_CHARS:
            return "".join(pieces)
        pieces.append((yield from source.next()))
        num_chars += 1


def _value(context: CallContext, depth: int) -> Reader[bool]:
    """Write one value to the output as JSON. Return False if the value is truncated or invalid."""
    source, output = context.source, context.output
    first = yield from source.peek()
    if first in ('"', "'") and first:
        return (yield from _string(context))
    if first in ("[", "(", "{") and first:
        return depth > 0 and (yield from read_collection(context, depth - 1, key=_key, value=_value))
    word = yield from _word(source)
    if word in _WORDS:
        output.arguments(_WORDS[word])
    elif NUMBER.fullmatch(word):
        output.arguments(word)
    elif word:
        output.arguments(f'"{quoted(word)}"')
    return bool(word) and bool((yield from source.peek()))


def read_collection(
    context: CallContext,
    depth: int,
    *,
    key: Callable[[CallContext, str], Reader[bool]],
    value: Callable[[CallContext, int], Reader[bool]],
) -> Reader[bool]:
    """Write a list, tuple or dictionary to the output as JSON. Return False if it is truncated or malformed.

    `key` reads and writes a separator and the key of a member. `value` reads and writes a value.
    """
    source, output = context.source, context.output
    opening = yield from source.next()
    is_object = opening == "{"
    closing = {"{": "}", "[": "]", "(": ")"}[opening]
    output.arguments("{" if is_object else "[")
    before = ""
    while True:
        yield from source.skip()
        letter = yield from source.peek()
        if letter == closing:
            yield from source.next()
            output.arguments("}" if is_object else "]")
            return True
        if letter == "," and before:
            yield from source.next()
            continue
        if not letter or letter in ",)]}":
            return False
        if not is_object:
            output.arguments(before)
        elif not (yield from key(context, before)):
            return False
        before = ", "
        if not (yield from value(context, depth)):
            return False


def _key(context: CallContext, before: str) -> Reader[bool]:
    source, output = context.source, context.output
    if (yield from source.peek()) not in ('"', "'"):
        return False
    output.arguments(before)
    if not (yield from _string(context)):
        return False
    yield from source.skip()
    if (yield from source.one_of(_COLON)) is None:
        return False
    output.arguments(": ")
    yield from source.skip()
    return True


def _string(context: CallContext) -> Reader[bool]:
    """Write one string to the output as a JSON string while it arrives. Return False if it is truncated.

    Models forget to escape quotes inside strings. Therefore a quote ends the string only if the next character may
    follow a string.
    """
    source, output = context.source, context.output
    quote = yield from source.next()
    output.arguments('"')
    while True:
        char = yield from source.while_in(_QUOTED[quote], lambda text: output.arguments(quoted(text)))
        if not char:
            return False
        yield from source.next()
        if char == quote:
            space = ""
            while (letter := (yield from source.peek())).isspace():
                space += yield from source.next()
            if not letter or letter in _AFTER_STRING or context.ends.may_begin(letter, 0):
                output.arguments('"')
                return True
            output.arguments(quoted(quote + space))
            continue
        escaped = yield from source.next()
        if not escaped:
            return False
        digits = ""
        while len(digits) < _HEX.get(escaped, 0):
            digit = yield from source.peek()
            if not digit or digit not in "0123456789abcdefABCDEF":
                break
            digits += yield from source.next()
        output.arguments(_unescaped(escaped, digits))


def _unescaped(escaped: str, digits: str) -> str:
    """Return the JSON text of a Python escape: a backslash, the character `escaped`, and these hexadecimal digits."""
    if escaped in _HEX and len(digits) == _HEX[escaped]:
        point = int(digits, 16)
        if 0xD800 <= point < 0xE000:  # half a surrogate pair, for which JSON has the same escape
            return f"\\u{point:04x}"
        if point <= 0x10FFFF:
            return quoted(chr(point))
    if escaped in _ESCAPES and not digits:
        return quoted(_ESCAPES[escaped])
    return quoted(escaped if escaped in "\\'\"/" else f"\\{escaped}{digits}")
