"""Calls whose arguments are written as JSON: objects with a name, lists of them, and names before the arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from serve.chat.scan.json_text import MAX_NAME_CHARS, is_unicode, quoted, read_value, short_string
from serve.chat.scan.source import Marks, Reader
from serve.chat.tools.format import CallContext, CallReader

_BRACE, _COLON, _COMMA = Marks(("{",)), Marks((":",)), Marks((",",))
_LIST, _LIST_END = Marks(("[",)), Marks(("]",))
_FENCE, _FENCE_END = Marks(("```json",)), Marks(("```",))
_NAME = re.compile(r"[\w.:/-]{1,128}")
# Members of a call's object that say nothing the call does not say.
_LABELS = ("id", "type", "tool_call_id")
_LABEL = re.compile(r'"[^"\\]{0,128}"|\d{1,18}')


class Keys(NamedTuple):
    """What the keys of a call's object are called."""

    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")


_KEYS = Keys()


def json_list(keys: Keys = _KEYS, *, only_offered: bool = False, several: bool = False) -> CallReader:
    """[{"name": ..., "arguments": {...}}, ...], or one such object; with `only_offered` another name makes no call.

    `several`: objects may follow each other without a list.
    """

    def read(context: CallContext) -> Reader[bool]:
        source = context.source
        yield from source.skip()
        if (yield from source.one_of(_LIST)) is None:
            found = yield from _read_object(context, keys, only_offered=only_offered)
            while found and several:
                source.trace()
                yield from source.skip()
                if (yield from source.peek()) != "{":
                    break
                if not (yield from _read_object(context, keys, only_offered=only_offered)):
                    yield from leave(context, source.traced())
                    break
            return found
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
    """Pass on as text what does not go on as a call, but for punctuation at the end of an output."""
    if any(map(str.isalnum, rest)) or (rest and (yield from context.source.peek())):
        context.output.content(rest)


def named(
    ends: Marks,
    *,
    before: Marks | None = None,
    behind: Marks | None = None,
    read_name: Callable[[str], tuple[str, str | None] | None] | None = None,
) -> CallReader:
    """NAME, one of `ends`, and the arguments. An end that is "{" belongs to the arguments.

    `before` may stand before the name and `behind` behind the arguments; `read_name` makes (name, id) of what stands
    before the end, or None where that is no name.
    """

    def read(context: CallContext) -> Reader[bool]:
        source, output = context.source, context.output
        if before is not None:
            yield from source.one_of(before)
        yield from source.skip()
        found = yield from source.short(ends, MAX_NAME_CHARS)
        if found is None:
            return False
        text, end = found
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
        if behind is not None:
            yield from source.skip()
            yield from source.one_of(behind)
        return True

    return read


def plain_name(text: str) -> tuple[str, str | None] | None:
    text = text.strip()
    return (text, None) if _NAME.fullmatch(text) else None


def read_arguments(context: CallContext) -> Reader[bool]:
    """Pass on the arguments of a call that has started. False where they are not complete."""
    source, output = context.source, context.output
    first = yield from source.peek()
    if first == "{":
        return (yield from read_value(source, output.arguments, context.ends))
    if not first or context.ends.may_begin(first, 0):
        return bool(first)  # nothing, or the end of the call
    pieces: list[str] = []
    is_whole = yield from read_value(source, pieces.append, context.ends)
    output.arguments(_as_object("".join(pieces)) if is_whole else "".join(pieces))
    return is_whole


def _as_object(text: str) -> str:
    """Arguments that are written as null, or as JSON within a string."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return text
    if value is None or value == "":
        return "{}"
    return value if isinstance(value, str) and is_unicode(value) else text


def _read_object(context: CallContext, keys: Keys, *, only_offered: bool) -> Reader[bool]:
    """One object. Members that belong to no call are text, behind the call."""
    strange: list[str] = []
    has_started = yield from _read_members(context, keys, strange, only_offered=only_offered)
    if has_started and strange:
        context.output.content(", ".join(strange))
    yield from leave(context, context.source.traced() if has_started else "")
    return has_started


def _read_members(
    context: CallContext, keys: Keys, strange: list[str], *, only_offered: bool
) -> Reader[bool]:
    """Whether a call has started: with its arguments, or where it turns out to have a name but none of them.

    What does not go on as an object is left in the trace of the source.
    """
    source, output = context.source, context.output
    yield from source.skip()
    if (yield from source.one_of(_BRACE)) is None:
        return False
    name: str | None = None
    held: list[str] = []  # arguments that stand before the name
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
            if held:
                _start(context, name)
                output.arguments(_as_object("".join(held)))
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
            if key in keys.arguments and not has_started and not held:
                held.append(value)
            elif key not in _LABELS or _LABEL.fullmatch(value) is None:
                strange.append(f'"{quoted(key)}": {value}')
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
    """A key and its colon, up to the value."""
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
