"""Gemma 4's calls, with special quotes and bare keys: <|tool_call>call:NAME{key:<|"|>text<|"|>,n:5}<tool_call|>."""

from __future__ import annotations

import re

from serve.calls.chat.scan.json_text import MAX_NAME_CHARS, quoted
from serve.calls.chat.scan.source import Marks, Reader
from serve.calls.chat.tools.format import CallContext, ToolFormat
from serve.calls.chat.tools.json_calls import plain_name, read_arguments
from serve.calls.chat.tools.python_calls import MAX_DEPTH, NUMBER, read_collection

QUOTE = '<|"|>'

_JSON = Marks(('{"',))
_CALL, _BRACE, _QUOTE = Marks(("call:",)), Marks(("{",)), Marks((QUOTE,))
_COLON = Marks((":",))
_AFTER_WORD = re.compile(r"[,{}\[\]<]")
_BLANK = ' \r\n\t<|"'  # characters before a key that are not part of it: white space, and parts of an incomplete quote


def _read(context: CallContext) -> Reader[bool]:
    source, output = context.source, context.output
    yield from source.skip()
    if (yield from source.one_of(_CALL)) is None:
        return False
    match = yield from source.short(_BRACE, MAX_NAME_CHARS)
    name = plain_name(match[0]) if match else None
    if name is None:
        return False
    source.give_back("{")
    source.traced()
    output.start(name[0])
    if (yield from source.one_of(_JSON)) is None:
        yield from read_collection(context, MAX_DEPTH, key=_key, value=_value)
    else:  # a quoted key: the model wrote ordinary JSON, because Gemma's format has bare keys
        source.give_back('{"')
        yield from read_arguments(context)
    return True


def _value(context: CallContext, depth: int) -> Reader[bool]:
    """Write one value to the output as JSON. Return False if the value is truncated or invalid."""
    source, output = context.source, context.output
    if (yield from source.one_of(_QUOTE)) is not None:
        output.arguments('"')
        if (yield from source.until(_QUOTE, lambda text: output.arguments(quoted(text)))) is None:
            return False
        output.arguments('"')
        return True
    first = yield from source.peek()
    if first in ("{", "["):
        return depth > 0 and (yield from read_collection(context, depth - 1, key=_key, value=_value))
    pieces: list[str] = []
    end = yield from source.while_in(_AFTER_WORD, pieces.append)
    word = "".join(pieces)
    stripped = word.strip()
    if not end or not stripped:
        output.arguments(word)
        return False
    stripped = "null" if stripped == "None" else stripped  # Gemma's chat template writes null as None
    is_json = stripped in ("true", "false", "null") or NUMBER.fullmatch(stripped)
    output.arguments(stripped if is_json else f'"{quoted(stripped)}"')
    return True


def _key(context: CallContext, before: str) -> Reader[bool]:
    source, output = context.source, context.output
    source.trace()
    yield from source.one_of(_QUOTE)
    match = yield from source.short(_COLON, MAX_NAME_CHARS)
    unfinished = source.traced()
    if match is None:
        if unfinished.strip(_BLANK) or (yield from source.peek()):
            output.content(unfinished)
        return False
    output.arguments(f'{before}"{quoted(match[0].strip().removesuffix(QUOTE))}": ')
    yield from source.skip()
    return True


GEMMA4 = ToolFormat(
    call_open=("<|tool_call>",),
    call_close=("<tool_call|>",),
    read=_read,
    shown=(QUOTE,),
    arguments="tags",
    rendered=lambda name: (f"<|tool_call>call:{name}", "<tool_call|>"),
)

FORMATS = {
    "gemma4": GEMMA4,
}
