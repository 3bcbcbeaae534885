"""DeepSeek: V3 and R1 with fenced JSON, V3.1 with plain JSON, V3.2 with parameters between tags."""

from __future__ import annotations

from serve.chat.scan.source import Marks
from serve.chat.tools.format import Rendered, ToolFormat
from serve.chat.tools.json_calls import named
from serve.chat.tools.parameters import Parameters

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

_DSML = Parameters(
    name_end=(">",),
    parameter_open="<｜DSML｜parameter name=",
    key_end=(">",),
    value_close=("</｜DSML｜parameter>",),
    call_close=("</｜DSML｜invoke>",),
    string_attribute=True,
)

DEEPSEEK_V32 = ToolFormat(
    section_open=("<｜DSML｜function_calls>", "<｜DSML｜tool_calls>"),
    section_close=("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>"),
    call_open=("<｜DSML｜invoke name=",),
    call_close=_DSML.call_close,
    read=_DSML,
    shown=("｜DSML｜",),
    arguments="tags",
    rendered=lambda name: (f'<｜DSML｜invoke name="{name}">\n', "\n</｜DSML｜invoke>"),
    rendered_all=("<｜DSML｜function_calls>\n", "\n", "\n</｜DSML｜function_calls>"),
)
