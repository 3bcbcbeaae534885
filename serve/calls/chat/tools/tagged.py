"""Formats with parameters between tags: Qwen3 Coder, Seed OSS, GLM 4.5+, Step 3, MiniMax M2, DeepSeek V3.2."""

from __future__ import annotations

from serve.calls.chat.tools.format import ToolFormat
from serve.calls.chat.tools.parameters import Parameters

_QWEN = Parameters(
    name_end=(">",),
    parameter_open="<parameter=",
    key_end=(">",),
    value_close=("\n</parameter>", "</parameter>"),
    unclosed=("\n<parameter=", "\n</function>\n</tool_call>", "\n</function>\n</seed:tool_call>"),
    call_close=("</function>",),
)


def _functions(tag: str) -> ToolFormat:
    """Return the format of <function=NAME> calls between <tag> and </tag>."""
    return ToolFormat(
        section_open=(f"<{tag}>",),
        section_close=(f"</{tag}>",),
        call_open=("<function=",),
        call_close=_QWEN.call_close,
        read=_QWEN,
        parameters=_QWEN,
        arguments="tags",
        rendered=lambda name: (f"<{tag}>\n<function={name}>\n", f"</function>\n</{tag}>"),
        rendered_all=("", "\n", ""),
    )


QWEN3_CODER = _functions("tool_call")
SEED_OSS = _functions("seed:tool_call")

_GLM = Parameters(
    name_end=("\n", "<arg_key>", "</tool_call>"),
    parameter_open="<arg_key>",
    key_end=("</arg_key>",),
    value_open=("<arg_value>",),
    value_close=("</arg_value>",),
    call_close=("</tool_call>",),
)

GLM45 = ToolFormat(
    call_open=("<tool_call>",),
    call_close=_GLM.call_close,
    read=_GLM,
    parameters=_GLM,
    arguments="tags",
    rendered=lambda name: (f"<tool_call>{name}\n", "</tool_call>"),
    rendered_all=("", "\n", ""),
    shown=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)

_STEP = Parameters(
    before_name=("function<｜tool_sep｜><steptml:invoke name=", "<steptml:invoke name="),
    name_end=(">",),
    parameter_open="<steptml:parameter name=",
    key_end=(">",),
    value_close=("</steptml:parameter>",),
    call_close=("</steptml:invoke>",),
)

STEP3 = ToolFormat(
    section_open=("<｜tool_calls_begin｜>",),
    section_close=("<｜tool_calls_end｜>",),
    call_open=("<｜tool_call_begin｜>",),
    call_close=("<｜tool_call_end｜>",),
    read=_STEP,
    parameters=_STEP,
    arguments="tags",
    rendered=lambda name: (
        f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">\n',
        "</steptml:invoke><｜tool_call_end｜>",
    ),
    rendered_all=("<｜tool_calls_begin｜>\n", "\n", "\n<｜tool_calls_end｜>"),
    shown=("<｜tool_sep｜>",),
)

_MINIMAX = Parameters(
    name_end=(">",),
    parameter_open="<parameter name=",
    key_end=(">",),
    value_close=("</parameter>",),
    unclosed=("\n<parameter name=", "\n</invoke>\n</minimax:tool_call>"),
    call_close=("</invoke>",),
)

MINIMAX = ToolFormat(
    section_open=("<minimax:tool_call>",),
    section_close=("</minimax:tool_call>",),
    call_open=("<invoke name=",),
    call_close=_MINIMAX.call_close,
    read=_MINIMAX,
    parameters=_MINIMAX,
    arguments="tags",
    rendered=lambda name: (f'<invoke name="{name}">\n', "</invoke>"),
    rendered_all=("<minimax:tool_call>\n", "\n", "\n</minimax:tool_call>"),
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

FORMATS = {
    "deepseekv32": DEEPSEEK_V32,
    "glm45": GLM45,
    "glm47": GLM45,
    "minimax-m2": MINIMAX,
    "qwen3_coder": QWEN3_CODER,
    "seed_oss": SEED_OSS,
    "step3": STEP3,
    "step3p5": QWEN3_CODER,
}
