"""Formats that write a call's name and then its arguments as JSON: Mistral, DeepSeek V3 and V3.1, Kimi K2.

Mistral before Small 3.2 wrote a list of objects, which its format reads too.
"""

from __future__ import annotations

import re
from hashlib import sha256

from serve.chat.scan.source import Marks, Reader
from serve.chat.tools.format import CallContext, Rendered, ToolFormat
from serve.chat.tools.json_calls import json_list, named, plain_name

# --- Mistral: [TOOL_CALLS]name[CALL_ID]id[ARGS]{...} ---

_read_list = json_list()
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
_MISTRAL_ENDS = Marks(("[ARGS]", "{"))


def _mistral_id(call_id: str, name: str, index: int) -> str:
    """Nine letters or digits; the templates refuse others."""
    return call_id if _MISTRAL_ID.fullmatch(call_id) else sha256(call_id.encode()).hexdigest()[:9]


def _mistral_name(text: str) -> tuple[str, str | None] | None:
    """Some versions write a call's id behind its name."""
    name, mark, call_id = text.partition("[CALL_ID]")
    found = plain_name(name)
    if found is None or not mark:
        return found
    return (found[0], call_id) if _MISTRAL_ID.fullmatch(call_id) else None


_read_named = named(_MISTRAL_ENDS, read_name=_mistral_name)


def _read_mistral(context: CallContext) -> Reader[bool]:
    yield from context.source.skip()
    if (yield from context.source.peek()) in ("[", "{"):
        return (yield from _read_list(context))
    return (yield from _read_named(context))


def _mistral_rendered(name: str) -> Rendered:
    return f"[TOOL_CALLS]{name}[ARGS]", ""


def _list_rendered(name: str) -> Rendered:
    return f'{{"name": "{name}", "arguments": ', "}"


MISTRAL = ToolFormat(
    call_open=("[TOOL_CALLS]",),
    read=_read_mistral,
    shaped_id=_mistral_id,
    shown=("[ARGS]", "[CALL_ID]"),
    rendered=_mistral_rendered,
)

# Reads the same; calls that are enforced are written in the older way.
MISTRAL_LIST = ToolFormat(
    call_open=("[TOOL_CALLS]",),
    read=_read_mistral,
    shaped_id=_mistral_id,
    shown=("[ARGS]", "[CALL_ID]"),
    rendered=_list_rendered,
    rendered_all=("[TOOL_CALLS] [", ", ", "]"),
)

# --- DeepSeek: V3 and R1 with fenced JSON, V3.1 with plain JSON ---

_SECTION = ("<｜tool▁calls▁begin｜>",)
_SECTION_END = ("<｜tool▁calls▁end｜>",)
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def _rendered_v3(name: str) -> Rendered:
    return f"{_CALL}function{_SEP}{name}\n```json\n", f"\n```{_CALL_END}"


def _rendered_v31(name: str) -> Rendered:
    return f"{_CALL}{name}{_SEP}", _CALL_END


DEEPSEEK_V3 = ToolFormat(
    section_open=_SECTION,
    section_close=_SECTION_END,
    call_open=(_CALL,),
    call_close=(_CALL_END,),
    read=named(Marks(("```json", "{")), before=Marks((f"function{_SEP}",)), behind=Marks(("```",))),
    shown=(_SEP,),
    rendered=_rendered_v3,
    rendered_all=(_SECTION[0], "\n", _SECTION_END[0]),
)

DEEPSEEK_V31 = ToolFormat(
    section_open=_SECTION,
    section_close=_SECTION_END,
    call_open=(_CALL,),
    call_close=(_CALL_END,),
    read=named(Marks((_SEP,))),
    shown=(_SEP,),
    rendered=_rendered_v31,
    rendered_all=(_SECTION[0], "", _SECTION_END[0]),
)

# --- Kimi K2: functions.NAME:INDEX is a call's id, which the model expects to see again ---

_KIMI_ID = re.compile(r"(?:functions\.)?([\w.\-/:]{1,128}?)(?::(\d{1,6}))?")


def _kimi_name(text: str) -> tuple[str, str | None] | None:
    match = _KIMI_ID.fullmatch(text)
    if match is None:
        return None
    return match[1], text if match[2] else None


def _kimi_id(call_id: str, name: str, index: int) -> str:
    """The template writes ids and no names."""
    return call_id if call_id.startswith(f"functions.{name}:") else f"functions.{name}:{index}"


def _kimi_rendered(name: str) -> Rendered:
    return f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>", "<|tool_call_end|>"


KIMI_K2 = ToolFormat(
    section_open=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    section_close=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    call_open=("<|tool_call_begin|>",),
    call_close=("<|tool_call_end|>",),
    read=named(Marks(("<|tool_call_argument_begin|>",)), read_name=_kimi_name),
    shaped_id=_kimi_id,
    shown=("<|tool_call_argument_begin|>",),
    rendered=_kimi_rendered,
    rendered_all=("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
)

FORMATS = {
    "deepseekv3": DEEPSEEK_V3,
    "deepseekv31": DEEPSEEK_V31,
    "kimi_k2": KIMI_K2,
    "mistral": MISTRAL,
    "mistral-list": MISTRAL_LIST,
}
