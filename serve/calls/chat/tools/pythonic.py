"""Calls in Python syntax: lists (Llama 3.2 and 4, Gemma 3, ToolACE), between marks (LFM2), one per line (OLMo 3).

Llama 4 and LFM2 may also write calls in JSON.
"""

from __future__ import annotations

from functools import partial

from serve.calls.chat.scan.source import Marks, Reader
from serve.calls.chat.tools.format import CallContext, ToolFormat
from serve.calls.chat.tools.json_calls import json_list
from serve.calls.chat.tools.python_calls import python_calls

_pythonic = partial(ToolFormat, rendered=lambda name: (f"{name}(", ")"), arguments="python")

PYTHONIC = _pythonic(
    call_open=("[",),
    read=python_calls(),
    rendered_all=("[", ", ", "]"),
)

_read_listed = python_calls()
_read_offered = json_list(only_offered=True)


def _read_llama4(context: CallContext) -> Reader[bool]:
    is_json = (yield from context.source.peek()) == "{"
    return (yield from (_read_offered if is_json else _read_listed)(context))


LLAMA4 = _pythonic(
    section_open=("<|python_start|>", "<|python_end|>"),  # the chat template writes text between these marks, then JSON
    section_close=("<|python_end|>",),
    call_open=("[",),
    separators=(";",),
    bare=True,
    read=_read_llama4,
    rendered_all=("<|python_start|>[", ", ", "]<|python_end|>"),
)

GEMMA3 = _pythonic(
    section_open=("```tool_code", "```python"),
    section_close=("```",),
    call_open=("[",),
    read=python_calls(),
    rendered_all=("[", ", ", "]"),
)

_read_python = python_calls(brackets=False, only_offered=False)
_read_json = json_list()
_OBJECTS = Marks(("{", "[{"))


def _read_lfm2(context: CallContext) -> Reader[bool]:
    """Read calls in Python syntax, or in JSON if a system message requested JSON."""
    yield from context.source.skip()
    mark = yield from context.source.one_of(_OBJECTS)
    if mark is None:
        return (yield from _read_python(context))
    context.source.give_back(mark)
    return (yield from _read_json(context))


LFM2 = _pythonic(
    call_open=("<|tool_call_start|>",),
    call_close=("<|tool_call_end|>",),
    read=_read_lfm2,
    rendered_all=("<|tool_call_start|>[", ", ", "]<|tool_call_end|>"),
)

OLMO3 = _pythonic(
    call_open=("<function_calls>",),
    call_close=("</function_calls>",),
    read=python_calls(brackets=False, only_offered=False),
    rendered_all=("<function_calls>", "\n", "</function_calls>"),
)

FORMATS = {
    "gemma3": GEMMA3,
    "lfm2": LFM2,
    "llama4": LLAMA4,
    "olmo3": OLMO3,
    "pythonic": PYTHONIC,
}
