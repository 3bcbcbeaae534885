"""[TOOL_CALLS] [{"name": ..., "arguments": {...}}], and since Mistral Small 3.2 [TOOL_CALLS]name[ARGS]{...}."""

from __future__ import annotations

import re
from hashlib import sha256

from serve.chat.scan.source import Marks, Reader
from serve.chat.tools.format import CallContext, Rendered, ToolFormat
from serve.chat.tools.json_calls import json_list, named, plain_name

_read_list = json_list()
_ID = re.compile(r"[A-Za-z0-9]{9}")
_ENDS = Marks(("[ARGS]", "{"))


def _shaped_id(call_id: str, name: str, index: int) -> str:
    """Nine letters or digits; the templates refuse others."""
    return call_id if _ID.fullmatch(call_id) else sha256(call_id.encode()).hexdigest()[:9]


def _name(text: str) -> tuple[str, str | None] | None:
    """Some versions write a call's id behind its name."""
    name, mark, call_id = text.partition("[CALL_ID]")
    found = plain_name(name)
    if found is None or not mark:
        return found
    return (found[0], call_id) if _ID.fullmatch(call_id) else None


_read_named = named(_ENDS, read_name=_name)


def _read(context: CallContext) -> Reader[bool]:
    yield from context.source.skip()
    if (yield from context.source.peek()) in ("[", "{"):
        return (yield from _read_list(context))
    return (yield from _read_named(context))


def _rendered(name: str) -> Rendered:
    return f"[TOOL_CALLS]{name}[ARGS]", ""


def _rendered_list(name: str) -> Rendered:
    return f'{{"name": "{name}", "arguments": ', "}"


MISTRAL = ToolFormat(
    call_open=("[TOOL_CALLS]",),
    read=_read,
    shaped_id=_shaped_id,
    shown=("[ARGS]", "[CALL_ID]"),
    rendered=_rendered,
)

# Reads the same; calls that are enforced are written in the older way.
MISTRAL_LIST = ToolFormat(
    call_open=("[TOOL_CALLS]",),
    read=_read,
    shaped_id=_shaped_id,
    shown=("[ARGS]", "[CALL_ID]"),
    rendered=_rendered_list,
    rendered_all=("[TOOL_CALLS] [", ", ", "]"),
)
