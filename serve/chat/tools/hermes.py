"""<tool_call>{"name": ..., "arguments": {...}}</tool_call>: Hermes, Qwen 2.5 and 3, Granite 4, many others."""

from __future__ import annotations

from serve.chat.tools.format import Rendered, ToolFormat
from serve.chat.tools.json_calls import json_list


def _rendered(name: str) -> Rendered:
    return f'<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>"


HERMES = ToolFormat(
    call_open=("<tool_call>",),
    call_close=("</tool_call>",),
    read=json_list(),
    rendered=_rendered,
    rendered_all=("", "\n", ""),
)
