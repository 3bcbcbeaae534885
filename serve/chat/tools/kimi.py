"""Kimi K2: functions.NAME:INDEX is a call's id, which the model expects to see again."""

from __future__ import annotations

import re

from serve.chat.scan.source import Marks
from serve.chat.tools.format import Rendered, ToolFormat
from serve.chat.tools.json_calls import named

_ID = re.compile(r"(?:functions\.)?([\w.\-/:]{1,128}?)(?::(\d{1,6}))?")


def _name(text: str) -> tuple[str, str | None] | None:
    match = _ID.fullmatch(text)
    if match is None:
        return None
    return match[1], text if match[2] else None


def _shaped_id(call_id: str, name: str, index: int) -> str:
    """The template writes ids and no names."""
    return call_id if call_id.startswith(f"functions.{name}:") else f"functions.{name}:{index}"


def _rendered(name: str) -> Rendered:
    return f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>", "<|tool_call_end|>"


KIMI_K2 = ToolFormat(
    section_open=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    section_close=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    call_open=("<|tool_call_begin|>",),
    call_close=("<|tool_call_end|>",),
    read=named(Marks(("<|tool_call_argument_begin|>",)), read_name=_name),
    shaped_id=_shaped_id,
    shown=("<|tool_call_argument_begin|>",),
    rendered=_rendered,
    rendered_all=("<|tool_calls_section_begin|>", "", "<|tool_calls_section_end|>"),
)
