"""Calls as in Python: a list of them (Llama 3.2, Gemma 3, Toolace), LFM2's between marks, OLMo 3's line by line."""

from __future__ import annotations

from serve.chat.scan.source import Marks, Reader
from serve.chat.tools.format import CallContext, ToolFormat
from serve.chat.tools.json_calls import json_list
from serve.chat.tools.python_calls import python_calls

PYTHONIC = ToolFormat(
    call_open=("[",),
    read=python_calls(),
    rendered=lambda name: (f"{name}(", ")"),
    rendered_all=("[", ", ", "]"),
    arguments="python",
)

GEMMA3 = ToolFormat(
    section_open=("```tool_code", "```python"),
    section_close=("```",),
    call_open=("[",),
    read=python_calls(),
    rendered=lambda name: (f"{name}(", ")"),
    rendered_all=("[", ", ", "]"),
    arguments="python",
)

_read_python = python_calls(brackets=False, only_offered=False)
_read_json = json_list()
_OBJECTS = Marks(("{", "[{"))


def _read_lfm2(context: CallContext) -> Reader[bool]:
    """Python, and JSON where a system message asked for it."""
    yield from context.source.skip()
    mark = yield from context.source.one_of(_OBJECTS)
    if mark is None:
        return (yield from _read_python(context))
    context.source.give_back(mark)
    return (yield from _read_json(context))


LFM2 = ToolFormat(
    call_open=("<|tool_call_start|>",),
    call_close=("<|tool_call_end|>",),
    read=_read_lfm2,
    rendered=lambda name: (f"{name}(", ")"),
    rendered_all=("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
    arguments="python",
)

OLMO3 = ToolFormat(
    call_open=("<function_calls>",),
    call_close=("</function_calls>",),
    read=python_calls(brackets=False, only_offered=False),
    rendered=lambda name: (f"{name}(", ")"),
    rendered_all=("<function_calls>", "\n", "</function_calls>"),
    arguments="python",
)
