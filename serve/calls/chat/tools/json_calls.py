"""Readers of calls in JSON: objects with name and arguments, lists of such objects, and a name before arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from serve.calls.chat.scan.json_text import MAX_NAME_CHARS, is_unicode, quoted, read_value, short_string
from serve.calls.chat.scan.source import Marks, Reader
from serve.calls.chat.tools.format import CallContext, CallReader

_BRACE, _COLON, _COMMA = Marks(("{",)), Marks((":",)), Marks((",",))
_LIST, _LIST_END = Marks(("[",)), Marks(("]",))
_FENCE, _FENCE_END = Marks(("```json",)), Marks(("```",))
_NAME = re.compile(r"[\w.:/-]{1,128}")
# Keys of a call's object that are skipped, because they add no information.
_LABELS = ("id", "type", "tool_call_id")
_LABEL = re.compile(r'"[^"\\]{0,128}"|\d{1,18}')


class Keys(NamedTuple):
    """Names of the keys of a call's object."""

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")


_KEYS = Keys()


def json_list(keys: Keys = _KEYS, *, only_offered: bool = False, several: bool = False) -> CallReader:
    """Return a reader of [{"name": ..., "arguments": {...}}, ...], or of one such object.

    `only_offered`: an object is a call only if it names a tool of the request. `several`: several objects may follow
    each other without a list.
    """

    def read(context: CallContext) -> Reader[bool]:
        source = context.source
        yield from source.skip()
        if (yield from source.one_of(_LIST)) is None:
            is_call = yield from _read_object(context, keys, only_offered=only_offered)
            while is_call and several:
                source.trace()
                yield from source.skip()
                if (yield from source.peek()) != "{":
                    break
                if not (yield from _read_object(context, keys, only_offered=only_offered)):
                    yield from leave(context, source.traced())
                    break
            return is_call
        if not (yield from _read_object(context, keys, only_offered=only_offered)):
            return False
        while True:
            source.trace()
            yield from source.skip()
            if (yield from source.one_of(_COMMA)) is None:
                if (yield from source.one_of(_LIST_END)) is None:
                    context.output.content(source.traced())
                return True
            if not (yield from _read_object(context, keys, only_offered=only_offered)):
                yield from leave(context, source.traced())
                return True

    return read


def leave(context: CallContext, rest: str) -> Reader[None]:
    """Write the text after a call as content, unless it is only punctuation at the end of the output."""
    if any(map(str.isalnum, rest)) or (rest and (yield from context.source.peek())):
        context.output.content(rest)


def named(
    ends: Marks,
    *,
    before: Marks | None = None,
    after: Marks | None = None,
    read_name: Callable[[str], tuple[str, str | None] | None] | None = None,
) -> CallReader:
    """Return a reader of calls that consist of a name, one of the marks `ends`, and the arguments in JSON.

    If the mark is "{", it is also part of the arguments. A mark of `before` may precede the name, and one of `after`
    may follow the arguments. `read_name` splits the text before the mark into (name, id), or returns None if the text
    is not a name.
    """

    def read(context: CallContext) -> Reader[bool]:
        source, output = context.source, context.output
        if before is not None:
            yield from source.one_of(before)
        yield from source.skip()
        match = yield from source.short(ends, MAX_NAME_CHARS)
        if match is None:
            return False
        text, end = match
        name = plain_name(text) if read_name is None else read_name(text.strip())
        if name is None:
            return False
        if end == "{":
            source.give_back(end)
        source.traced()
        output.start(*name)
        yield from source.skip()
        is_fenced = (yield from source.one_of(_FENCE)) is not None
        yield from source.skip()
        if (yield from read_arguments(context)):
            output.end_call()
        if is_fenced:
            yield from source.skip()
            yield from source.one_of(_FENCE_END)
        if after is not None:
            yield from source.skip()
            yield from source.one_of(after)
        return True

    return read


def plain_name(text: str) -> tuple[str, str | None] | None:
    text = text.strip()
    return (text, None) if _NAME.fullmatch(text) else None


def read_arguments(context: CallContext) -> Reader[bool]:
    """Copy the arguments of a started call to the output. Return False if the arguments are incomplete."""
    source, output = context.source, context.output
    first = yield from source.peek()
    if first == "{":
        return (yield from read_value(source, output.arguments, context.ends))
    if not first or context.ends.may_begin(first, 0):
        return bool(first)  # there are no arguments: the text ends (False), or the call ends (True)
    pieces: list[str] = []
    is_whole = yield from read_value(source, pieces.append, context.ends)
    output.arguments(_as_object("".join(pieces)) if is_whole else "".join(pieces))
    return is_whole


def _as_object(text: str) -> str:
    """Return the JSON text of a call's arguments, as an object if possible.

    Null and an empty string become {}. A string that contains JSON becomes this JSON. Other values do not change. Text
    that is not JSON becomes a JSON string.
    """
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return f'"{quoted(text)}"'
    if value is None or value == "":
        return "{}"
    try:
        return value if isinstance(value, str) and is_unicode(value) and json.loads(value) is not None else text
    except ValueError:
        return text


def _read_object(context: CallContext, keys: Keys, *, only_offered: bool) -> Reader[bool]:
    """Read one object as a call. Members other than name, arguments and labels become content after the call."""
    extra: list[str] = []
    has_started = yield from _read_members(context, keys, extra, only_offered=only_offered)
    if has_started and extra:
        context.output.content(", ".join(extra))
    yield from leave(context, context.source.traced() if has_started else "")
    return has_started


def _read_members(context: CallContext, keys: Keys, extra: list[str], *, only_offered: bool) -> Reader[bool]:
    """Read the object's members. Return whether they started a call.

    A call starts at its arguments, or at the end of an object that has only a name. If the text is no valid object, the
    invalid rest stays in the source's trace.
    """
    source, output = context.source, context.output
    yield from source.skip()
    if (yield from source.one_of(_BRACE)) is None:
        return False
    name: str | None = None
    early_arguments: list[str] = []  # arguments that precede the name
    has_started = False
    while True:
        yield from source.skip()
        if (yield from source.one_of(_COMMA)) is not None:
            continue
        if (yield from source.peek()) == "}":
            yield from source.next()
            break
        key = yield from _key(context)
        if key is None:
            return has_started
        if key in keys.names and name is None:
            name = yield from short_string(source)
            if not name or _NAME.fullmatch(name) is None or (only_offered and name not in context.tools):
                return False
            if early_arguments:
                _start(context, name)
                output.arguments(_as_object("".join(early_arguments)))
                has_started = True
        elif key in keys.arguments and name is not None and not has_started:
            _start(context, name)
            has_started = True
            if not (yield from read_arguments(context)):
                return True
        else:
            pieces: list[str] = []
            if not (yield from read_value(source, pieces.append, context.ends)):
                return has_started
            value = "".join(pieces)
            if key in keys.arguments and not has_started and not early_arguments:
                early_arguments.append(value)
            elif key not in _LABELS or _LABEL.fullmatch(value) is None:
                extra.append(f'"{quoted(key)}": {value}')
        if has_started:
            source.trace()
    if not has_started and (name is None or only_offered):
        return False
    if name is not None and not has_started:
        _start(context, name)
    source.traced()
    output.end_call()
    return True


def _key(context: CallContext) -> Reader[str | None]:
    """Read a key and its colon, up to the value. Return None if the text is not a key."""
    source = context.source
    key = yield from short_string(source)
    yield from source.skip()
    if key is None or (yield from source.one_of(_COLON)) is None:
        return None
    yield from source.skip()
    return key


def _start(context: CallContext, name: str) -> None:
    context.source.traced()
    context.output.start(name)
