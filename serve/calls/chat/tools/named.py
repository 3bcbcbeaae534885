"""Formats that write a call's name before its arguments in JSON: Mistral, DeepSeek V3 and V3.1, Kimi K2.

Mistral models before Small 3.2 write a list of JSON objects instead. The Mistral reader accepts both formats.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from hashlib import sha256

from serve.calls.chat.scan.source import Marks, Reader
from serve.calls.chat.tools.format import CallContext, ToolFormat
from serve.calls.chat.tools.json_calls import json_list, named, plain_name

# --- Mistral: [TOOL_CALLS]name[CALL_ID]id[ARGS]{...} ---

_read_list = json_list()
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")
_MISTRAL_ENDS = Marks(("[ARGS]", "{"))


def _mistral_id(call_id: str, name: str, index: int) -> str:
    """Return an id of nine letters or digits. Mistral's chat templates reject other ids."""
    return call_id if _MISTRAL_ID.fullmatch(call_id) else sha256(call_id.encode()).hexdigest()[:9]


def _mistral_name(text: str) -> tuple[str, str | None] | None:
    """Return the call's name, and its id if the model writes one, or None if the text is not a name."""
    name, mark, call_id = text.partition("[CALL_ID]")
    plain = plain_name(name)
    if plain is None or not mark:
        return plain
    return (plain[0], call_id) if _MISTRAL_ID.fullmatch(call_id) else None


_read_named = named(_MISTRAL_ENDS, read_name=_mistral_name)


def _read_mistral(context: CallContext) -> Reader[bool]:
    yield from context.source.skip()
    if (yield from context.source.peek()) in ("[", "{"):
        return (yield from _read_list(context))
    return (yield from _read_named(context))


MISTRAL = ToolFormat(
    call_open=("[TOOL_CALLS]",),
    read=_read_mistral,
    shaped_id=_mistral_id,
    shown=("[ARGS]", "[CALL_ID]"),
    rendered=lambda name: (f"[TOOL_CALLS]{name}[ARGS]", ""),
)

# Reads both formats, like MISTRAL, but a grammar that enforces calls requires the older format, a list of objects.
MISTRAL_LIST = replace(
    MISTRAL,
    rendered=lambda name: (f'{{"name": "{name}", "arguments": ', "}"),
    rendered_all=("[TOOL_CALLS] [", ", ", "]"),
)

# --- DeepSeek: V3 and R1 with fenced JSON, V3.1 with plain JSON ---

_SECTION = ("<｜tool▁calls▁begin｜>",)
_SECTION_END = ("<｜tool▁calls▁end｜>",)
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


_deepseek = partial(
    ToolFormat,
    section_open=_SECTION,
    section_close=_SECTION_END,
    call_open=(_CALL,),
    call_close=(_CALL_END,),
    shown=(_SEP,),
)

DEEPSEEK_V3 = _deepseek(
    read=named(Marks(("```json", "{")), before=Marks((f"function{_SEP}",)), after=Marks(("```",))),
    rendered=lambda name: (f"{_CALL}function{_SEP}{name}\n```json\n", f"\n```{_CALL_END}"),
    rendered_all=(_SECTION[0], "\n", _SECTION_END[0]),
)

DEEPSEEK_V31 = _deepseek(
    read=named(Marks((_SEP,))),
    rendered=lambda name: (f"{_CALL}{name}{_SEP}", _CALL_END),
    rendered_all=(_SECTION[0], "", _SECTION_END[0]),
)

# --- Kimi K2: functions.NAME:INDEX is a call's id, which the model expects in later prompts ---

_KIMI_ID = re.compile(r"(?:functions\.)?([\w.\-/:]{1,128}?)(?::(\d{1,6}))?")


def _kimi_name(text: str) -> tuple[str, str | None] | None:
    match = _KIMI_ID.fullmatch(text)
    if match is None:
        return None
    return match[1], text if match[2] else None


def _kimi_id(call_id: str, name: str, index: int) -> str:
    """Return an id that contains the function's name, because the chat template writes the id in place of the name."""
    return call_id if call_id.startswith(f"functions.{name}:") else f"functions.{name}:{index}"


KIMI_K2 = ToolFormat(
    section_open=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    section_close=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    call_open=("<|tool_call_begin|>",),
    call_close=("<|tool_call_end|>",),
    read=named(Marks(("<|tool_call_argument_begin|>",)), read_name=_kimi_name),
    shaped_id=_kimi_id,
    shown=("<|tool_call_argument_begin|>",),
    rendered=lambda name: (f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    rendered_all=("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
)

FORMATS = {
    "deepseekv3": DEEPSEEK_V3,
    "deepseekv31": DEEPSEEK_V31,
    "kimi_k2": KIMI_K2,
    "mistral": MISTRAL,
    "mistral-list": MISTRAL_LIST,
}
