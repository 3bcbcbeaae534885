"""Read calls whose parameters are text between tags: <parameter=city>Paris</parameter>.

Each text is converted to a JSON value of the type in the tool's schema. Strings are streamed as they arrive.
"""

from __future__ import annotations

import ast
import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from serve.calls.chat.scan.json_text import MAX_NAME_CHARS, is_unicode, quoted
from serve.calls.chat.scan.source import Marks, Reader
from serve.calls.chat.tools.format import CallContext
from serve.calls.chat.tools.json_calls import plain_name, read_arguments

MAX_LITERAL_CHARS = 4096  # longer values are not parsed as Python literals


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """The marks of a call whose parameters are written between tags. An instance is a `CallReader`."""

    before_name: tuple[str, ...] = ()  # if set, one of these marks must precede the name
    # Marks after the name. If such a mark also begins a parameter or ends the call, it is read again for this purpose.
    name_end: tuple[str, ...]
    parameter_open: str
    key_end: tuple[str, ...]  # marks after a parameter's name
    value_open: tuple[str, ...] = ()  # marks that may come between key_end and the value
    value_close: tuple[str, ...]
    unclosed: tuple[str, ...] = ()  # marks that end a value whose closing mark is missing
    call_close: tuple[str, ...]
    string_attribute: bool = False  # whether tags declare strings: name="x" string="true"

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
        match = yield from source.short(marks["name_end"], MAX_NAME_CHARS)
        name = plain_name(match[0].strip().strip("\"'")) if match else None
        if match is None or name is None:
            return False
        if match[1] == self.parameter_open or match[1] in self.call_close:
            source.give_back(match[1])
        source.traced()
        output.start(name[0])
        yield from source.skip()
        if (yield from source.peek()) == "{":  # some models write one JSON object instead of tags
            if (yield from read_arguments(context)):
                output.end_call()
        elif not (yield from self._parameters(context, name[0])):
            return True
        yield from source.skip()
        yield from source.one_of(marks["end"])
        return True

    def _parameters(self, context: CallContext, name: str) -> Reader[bool]:
        """Read all parameters. Return False if the call is truncated."""
        source, output, marks = context.source, context.output, self._marks
        before = "{"
        while True:
            source.trace()
            yield from source.skip()
            if (yield from source.one_of(marks["open"])) is None:
                break
            match = yield from source.short(marks["key_end"], MAX_NAME_CHARS)
            if match is None:
                break
            key, is_string = self._key(match[0])
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
        is_truncated = is_at_end and not any(mark in rest for mark in self.call_close)
        if not is_truncated:
            output.arguments("{}" if before == "{" else "}")
        if any(map(str.isalnum, rest)) or (rest.strip() and not is_truncated):
            output.content(rest)
        return not is_truncated

    def _key(self, text: str) -> tuple[str, bool | None]:
        """Return a parameter's name, and whether its tag declares the value a string (None: no declaration)."""
        if not self.string_attribute:
            return text.strip().strip("\"'"), None
        match = _ATTRIBUTES.fullmatch(text.strip())
        if match is None:
            return text.strip().strip("\"'"), None
        return match[1], None if match[2] is None else match[2] == "true"

    def _value(self, context: CallContext, types: frozenset[str] | None) -> Reader[bool]:
        """Read one value, and write it as JSON. If the text ends inside it, write it unchanged, and return False."""
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
        """Skip the line break before a value that stands on its own lines."""
        if any(mark.startswith("\n") for mark in self.value_close):
            yield from context.source.one_of(_NEWLINE)


_NEWLINE = Marks(("\n",))
_ATTRIBUTES = re.compile(r'"([^"]*)"(?:\s+string="(true|false)")?')
_ANY = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})


def typed(text: str, types: frozenset[str] | None) -> str:
    """Return the value in `text` as JSON of one of `types` (None: any type).

    If `text` fits no type, return it as a JSON string.
    """
    stripped = text.strip()
    try:
        shaped = _shaped(json.loads(stripped, parse_constant=_reject_constant), types or _ANY, written=stripped)
    except (ValueError, RecursionError):
        shaped = _shaped(_python_value(stripped), types or _ANY)
        if shaped is None and types is not None and stripped[:1] in ("[", "{") and '\\"' in stripped:
            shaped = _unescaped(stripped, types)
    return f'"{quoted(text)}"' if shaped is None else shaped


def _unescaped(text: str, types: frozenset[str]) -> str | None:
    """Parse JSON whose quotes the model escaped, like {\\"a\\": 1}. Return None if the text is something else."""
    try:
        inner = json.loads(f'"{text}"', strict=False)
        return _shaped(json.loads(inner, parse_constant=_reject_constant), types, written=inner)
    except (ValueError, RecursionError):
        return None


def _reject_constant(word: str) -> None:
    """Reject NaN and infinities, which JSON does not have."""
    raise ValueError(word)


def _python_value(text: str) -> Any:
    """Parse the text as a Python literal.

    Return the text itself if it is not a literal, or if JSON would lose a part of it (a comment, a repeated key, the
    prefix r of a raw string).
    """
    if text in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[text]
    if text[:1] not in ("{", "[", "(") or len(text) > MAX_LITERAL_CHARS:
        return text
    try:
        value = ast.literal_eval(text)
        return (
            value if _letters_and_digits(json.dumps(value, ensure_ascii=False)) == _letters_and_digits(text) else text
        )
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return text


def _letters_and_digits(text: str) -> list[str]:
    """Return the sorted letters and digits of a text, to check that JSON lost no part of a Python literal."""
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
    """Return the value as JSON, or None if its type is not one of the wanted types.

    Also returns None for strings, because the caller then uses the text itself. `written` is the JSON text of the
    value, if the caller has it.
    """
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
