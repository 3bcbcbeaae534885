"""Formats with one JSON object or list between marks, and JSON without marks."""

from __future__ import annotations

from serve.calls.chat.tools.format import Rendered, ToolFormat
from serve.calls.chat.tools.json_calls import Keys, json_list


def _arguments(name: str) -> Rendered:
    return f'{{"name": "{name}", "arguments": ', "}"


HERMES = ToolFormat(  # also for Qwen 2.5 and 3, Granite 4 and many others
    call_open=("<tool_call>",),
    call_close=("</tool_call>",),
    read=json_list(several=True),
    rendered=lambda name: (f'<tool_call>\n{{"name": "{name}", "arguments": ', "}\n</tool_call>"),
    rendered_all=("", "\n", ""),
)

JSON = ToolFormat(
    section_open=("```json",),
    section_close=("```",),
    vague=("```json",),
    bare=True,
    read=json_list(only_offered=True),
    rendered=_arguments,
    rendered_all=("[", ", ", "]"),
)

GRANITE = ToolFormat(  # Granite 3.0 uses <|tool_call|>, later versions <tool_call>. Granite 4 uses HERMES
    call_open=("<|tool_call|>", "<tool_call>"),
    call_close=("</tool_call>",),
    read=json_list(),
    rendered=_arguments,
    rendered_all=("<|tool_call|>[", ", ", "]"),
)

PHI4 = ToolFormat(
    call_open=("functools", "<|tool_call|>"),
    vague=("functools",),
    call_close=("<|/tool_call|>",),
    read=json_list(),
    rendered=_arguments,
    rendered_all=("<|tool_call|>[", ", ", "]<|/tool_call|>"),
)

NEMOTRON = ToolFormat(
    call_open=("<TOOLCALL>",),
    call_close=("</TOOLCALL>",),
    read=json_list(),
    rendered=_arguments,
    rendered_all=("<TOOLCALL>[", ", ", "]</TOOLCALL>"),
)

HUNYUAN = ToolFormat(  # also for Apriel, and for MiniMax M1, which writes one object per line instead of a list
    call_open=("<tool_calls>",),
    call_close=("</tool_calls>",),
    read=json_list(several=True),
    rendered=_arguments,
    rendered_all=("<tool_calls>[", ", ", "]</tool_calls>"),
)

INTERNLM = ToolFormat(
    section_open=("<|action_start|>",),
    call_open=("<|plugin|>",),
    call_close=("<|action_end|>",),
    read=json_list(),
    rendered=lambda name: (
        f'<|action_start|><|plugin|>\n{{"name": "{name}", "parameters": ',
        "}<|action_end|>",
    ),
    rendered_all=("", "\n", ""),
)

COMMAND_R = ToolFormat(
    call_open=("<|START_ACTION|>",),
    call_close=("<|END_ACTION|>",),
    read=json_list(Keys(names=("tool_name", "name"), arguments=("parameters", "arguments"))),
    rendered=lambda name: (f'{{"tool_name": "{name}", "parameters": ', "}"),
    rendered_all=("<|START_ACTION|>[", ", ", "]<|END_ACTION|>"),
)

LLAMA3 = ToolFormat(  # calls may begin with <|python_tag|> or without a mark
    call_open=("<|python_tag|>",),
    separators=(";",),
    bare=True,
    read=json_list(only_offered=True),
    rendered=lambda name: (f'{{"name": "{name}", "parameters": ', "}"),
    rendered_all=("", "; ", ""),
    shown=("<|eom_id|>",),
)

FORMATS = {
    "command_r": COMMAND_R,
    "granite": GRANITE,
    "hermes": HERMES,
    "hunyuan": HUNYUAN,
    "interns1": INTERNLM,
    "json": JSON,
    "llama3": LLAMA3,
    "nemotron": NEMOTRON,
    "phi4": PHI4,
    "qwen": HERMES,
    "qwen25": HERMES,
}
