"""Llama: {"name": ..., "parameters": {...}}, bare or behind <|python_tag|>; Llama 4 writes Python's calls as well."""

from __future__ import annotations

from serve.chat.tools.format import Rendered, ToolFormat
from serve.chat.tools.json_calls import json_list
from serve.chat.tools.python_calls import python_calls


def _rendered(name: str) -> Rendered:
    return f'{{"name": "{name}", "parameters": ', "}"


LLAMA3 = ToolFormat(
    call_open=("<|python_tag|>",),
    separators=(";",),
    bare=True,
    read=json_list(only_offered=True),
    rendered=_rendered,
    rendered_all=("", "; ", ""),
    shown=("<|eom_id|>",),
)

LLAMA4 = ToolFormat(
    section_open=("<|python_start|>",),
    section_close=("<|python_end|>",),
    call_open=("[",),
    read=python_calls(),
    rendered=lambda name: (f"{name}(", ")"),
    rendered_all=("<|python_start|>[", ", ", "]<|python_end|>"),
    arguments="python",
)
