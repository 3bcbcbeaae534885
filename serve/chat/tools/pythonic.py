"""Calls as in Python: a list of them (Llama 3.2 and 4, Gemma 3, Toolace), LFM2's between marks, OLMo 3's line by line.

Llama 4 and LFM2 write JSON as well.
"""

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

_read_listed = python_calls()
_read_offered = json_list(only_offered=True)


def _read_llama4(context: CallContext) -> Reader[bool]:
    is_json = (yield from context.source.peek()) == "{"
    return (yield from (_read_offered if is_json else _read_listed)(context))


LLAMA4 = ToolFormat(
    section_open=("<|python_start|>", "<|python_end|>"),  # its template writes a text between them, then JSON
    section_close=("<|python_end|>",),
    call_open=("[",),
    separators=(";",),
    bare=True,
    read=_read_llama4,
    rendered=lambda name: (f"{name}(", ")"),
    rendered_all=("<|python_start|>[", ", ", "]<|python_end|>"),
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

FORMATS = {
    "gemma3": GEMMA3,
    "lfm2": LFM2,
    "llama4": LLAMA4,
    "olmo3": OLMO3,
    "pythonic": PYTHONIC,
}
