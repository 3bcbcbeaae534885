"""Llama: {"name": ..., "parameters": {...}}, bare or behind <|python_tag|>; Llama 4 writes Python's calls as well."""

from __future__ import annotations

from serve.chat.scan.source import Reader
from serve.chat.tools.format import CallContext, Rendered, ToolFormat
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

_read_python = python_calls()
_read_json = json_list(only_offered=True)


def _read_llama4(context: CallContext) -> Reader[bool]:
    is_json = (yield from context.source.peek()) == "{"
    return (yield from (_read_json if is_json else _read_python)(context))


LLAMA4 = ToolFormat(
    section_open=("<|python_start|>", "<|python_end|>"),  # its template writes a text between them, then JSON
    section_close=("<|python_end|>",),
    call_open=("[",),
    bare=True,
    read=_read_llama4,
    rendered=lambda name: (f"{name}(", ")"),
    rendered_all=("<|python_start|>[", ", ", "]<|python_end|>"),
    arguments="python",
)
