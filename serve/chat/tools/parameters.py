"""Calls whose parameters stand between tags of their own, as text: <parameter=city>Paris</parameter>.

The text becomes JSON of the type that the tool's schema gives the parameter. Strings are passed on as they come.
"""

from __future__ import annotations

import ast
import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from serve.chat.scan.json_text import MAX_NAME_CHARS, is_unicode, quoted
from serve.chat.scan.source import Marks, Reader
from serve.chat.tools.format import CallContext
from serve.chat.tools.json_calls import plain_name, read_arguments

MAX_LITERAL_CHARS = 4096  # of values that are no JSON but may be Python's


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """How a call with parameters is written, from behind its opening mark. A `CallReader`."""

    before_name: tuple[str, ...] = ()  # one of them stands before the name
    name_end: tuple[str, ...]  # behind the name; one that begins a parameter or ends the call belongs to it
    parameter_open: str
    key_end: tuple[str, ...]  # behind a parameter's name
    value_open: tuple[str, ...] = ()  # further on, before its value
    value_close: tuple[str, ...]
    unclosed: tuple[str, ...] = ()  # what ends a value that is not closed, and follows it
    call_close: tuple[str, ...]
    string_attribute: bool = False  # the tag says whether the value is a string: name="x" string="true"

    @cached_property
    def _marks(self) -> dict[str, Marks]:
        return {
            "before": Marks(self.before_name),
            "name_end": Marks(self.name_end),
            "open": Marks((self.parameter_open,)),
            "key_end": Marks(self.key_end),
            "value": Marks(self.value_open),
            "close": Marks(self.value_close + self.unclosed),
            "end": Marks(self.call_close),
        }

    def __call__(self, context: CallContext) -> Reader[bool]:
        source, output, marks = context.source, context.output, self._marks
        if self.before_name:
            yield from source.skip()
            if (yield from source.one_of(marks["before"])) is None:
                return False
        found = yield from source.short(marks["name_end"], MAX_NAME_CHARS)
        name = plain_name(found[0].strip().strip("\"'")) if found else None
        if found is None or name is None:
            return False
        if found[1] == self.parameter_open or found[1] in self.call_close:
            source.give_back(found[1])
        source.traced()
        output.start(name[0])
        yield from source.skip()
        if (yield from source.peek()) == "{":  # some models write JSON all the same
            if (yield from read_arguments(context)):
                output.end_call()
        elif not (yield from self._parameters(context, name[0])):
            return True
        yield from source.skip()
        yield from source.one_of(marks["end"])
        return True

    def _parameters(self, context: CallContext, name: str) -> Reader[bool]:
        """False where the call is cut off."""
        source, output, marks = context.source, context.output, self._marks
        before = "{"
        while True:
            source.trace()
            yield from source.skip()
            if (yield from source.one_of(marks["open"])) is None:
                break
            found = yield from source.short(marks["key_end"], MAX_NAME_CHARS)
            if found is None:
                break
            key, is_string = self._key(found[0])
            if self.value_open:
                yield from source.skip()
                yield from source.one_of(marks["value"])
            source.traced()
            output.arguments(f'{before}"{quoted(key)}": ')
            before = ", "
            types = context.tools.types_of(name, key)
            if is_string is not None:
                types = frozenset({"string"}) if is_string else (types or _ANY) - {"string"}
            if not (yield from self._value(context, types)):
                return False
        is_at_end = not (yield from source.peek())
        rest = source.traced()
        is_cut = is_at_end and not any(mark in rest for mark in self.call_close)
        if not is_cut:
            output.arguments("{}" if before == "{" else "}")
        if any(map(str.isalnum, rest)) or (rest.strip() and not is_cut):
            output.content(rest)
        return not is_cut

    def _key(self, text: str) -> tuple[str, bool | None]:
        """A parameter's name, and whether the tag says that its value is a string."""
        if not self.string_attribute:
            return text.strip().strip("\"'"), None
        found = _ATTRIBUTES.fullmatch(text.strip())
        if found is None:
            return text.strip().strip("\"'"), None
        return found[1], None if found[2] is None else found[2] == "true"

    def _value(self, context: CallContext, types: frozenset[str] | None) -> Reader[bool]:
        """False where the text ends within the value; then it is passed on as it is."""
        source, output, close = context.source, context.output, self._marks["close"]
        yield from self._one_newline(context)
        if types == {"string"}:
            output.arguments('"')
            mark = yield from source.until(close, lambda text: output.arguments(quoted(text)))
            if mark is None:
                return False
            output.arguments('"')
            if mark in self.unclosed:
                source.give_back(mark)
            return True
        pieces: list[str] = []
        mark = yield from source.until(close, pieces.append)
        text = "".join(pieces)
        output.arguments(text if mark is None else typed(text, types))
        if mark in self.unclosed:
            source.give_back(mark)
        return mark is not None

    def _one_newline(self, context: CallContext) -> Reader[None]:
        """A value that stands on lines of its own begins behind the line break."""
        if any(mark.startswith("\n") for mark in self.value_close):
            yield from context.source.one_of(_NEWLINE)


_NEWLINE = Marks(("\n",))
_ATTRIBUTES = re.compile(r'"([^"]*)"(?:\s+string="(true|false)")?')
_ANY = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})


def typed(text: str, types: frozenset[str] | None) -> str:
    """The JSON of a value that is written as `text`, of one of these types if that can be; else a string."""
    plain = text.strip()
    try:
        shaped = _shaped(json.loads(plain, parse_constant=_no_number), types or _ANY, written=plain)
    except (ValueError, RecursionError):
        shaped = _shaped(_python_value(plain), types or _ANY)
    return f'"{quoted(text)}"' if shaped is None else shaped


def _no_number(word: str) -> None:
    """NaN and infinities are none in JSON."""
    raise ValueError(word)


def _python_value(text: str) -> Any:
    """What the text means as Python writes it; a string where it means nothing, or where JSON would not say all of it
    (a comment, a key that comes twice, r"" before a text).
    """
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    if text[:1] not in ("{", "[", "(") or len(text) > MAX_LITERAL_CHARS:
        return text
    try:
        value = ast.literal_eval(text)
        return value if _substance(json.dumps(value, ensure_ascii=False)) == _substance(text) else text
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return text


def _substance(text: str) -> list[str]:
    """Its letters and digits, sorted."""
    return sorted(filter(str.isalnum, text.casefold().replace("null", "none")))


_KINDS = {
    bool: frozenset({"boolean"}),
    type(None): frozenset({"null"}),
    int: frozenset({"integer", "number"}),
    float: frozenset({"number"}),
    list: frozenset({"array"}),
    tuple: frozenset({"array"}),
    dict: frozenset({"object"}),
}


def _shaped(value: Any, wanted: frozenset[str], *, written: str | None = None) -> str | None:
    """Its JSON, as it is `written` if it is, or None where it is of none of the wanted types. A string is left to the
    text itself."""
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        if "number" not in wanted and "integer" in wanted and value.is_integer():
            value, written = int(value), None
    kinds = _KINDS.get(type(value), frozenset())
    if kinds.isdisjoint(wanted):
        return None
    if written is not None:
        return written
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if is_unicode(text) else json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return None
