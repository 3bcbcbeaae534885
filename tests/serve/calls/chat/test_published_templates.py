"""Calls in the format of published chat templates, and the detection of the format from the template.

The texts were written by hand for the named templates. Only the templates' marks are copied here.
"""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest

from runtime.config.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS, guess
from serve.calls.chat.events import collect
from serve.calls.chat.parser import OutputParser, ParserSettings
from serve.calls.chat.tools.offered import read_tools
from serve.calls.chat.tools.table import FORMATS

TOOLS = [
    {
        "function": {
            "name": "look",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            },
        }
    },
    {"function": {"name": "stop"}},
]
CALLS = [("look", {"city": "Ōsaka", "days": 3}), ("stop", {})]
ARGUMENTS = '{"city": "Ōsaka", "days": 3}'


class Published(NamedTuple):
    source: str
    marks: str  # marks that occur in the template
    parser: str
    reasoning: str | None
    output: str


PUBLISHED = [
    Published(
        "Nemotron Super 49B v1.5",
        "<|start_header_id|> enable_thinking '<TOOLCALL>[' '{\"name\": \"' '</think>' '<think>' add_generation_prompt",
        "nemotron",
        "qwen3",
        f'<TOOLCALL>[{{"name": "look", "arguments": {ARGUMENTS}}}, {{"name": "stop", "arguments": {{}}}}]</TOOLCALL>',
    ),
    Published(
        "GLM 4.5 and 4.6",
        "<tool_call>{function-name} <arg_key> <arg_value> enable_thinking '<think>' '</think>' add_generation_prompt",
        "glm45",
        "glm45",
        "\n<tool_call>look\n\n<arg_key>city</arg_key>\n<arg_value>Ōsaka</arg_value>\n\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n\n</tool_call>\n<tool_call>stop\n</tool_call>",
    ),
    Published(
        "DeepSeek V3.1",
        "thinking '<think>' '</think>' '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' '<｜tool▁sep｜>'",
        "deepseekv31",
        "deepseek-v3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    Published(
        "DeepSeek V3 with arguments written as a string, vLLM's example",
        "<｜tool▁calls▁begin｜> <｜tool▁call▁begin｜>function<｜tool▁sep｜> '\\n' + '```json' add_generation_prompt",
        "deepseekv3",
        None,
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n```json\n{json.dumps(ARGUMENTS)}\n```"
        '<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>stop\n```json\n"{}"\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
    ),
    Published(
        "Phi-4-mini with one object between the marks, llama.cpp's",
        "'<|tool|>' '<|/tool|>' '<|tool_call|>' '<|/tool_call|>' add_generation_prompt",
        "phi4",
        None,
        f'<|tool_call|>{{"name": "look", "arguments": {ARGUMENTS}}}<|/tool_call|>'
        '<|tool_call|>{"name": "stop", "arguments": {}}<|/tool_call|>',
    ),
    Published(
        "Mistral Small 3.1, with ids",
        "[AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS]",
        "mistral-list",
        None,
        f'[TOOL_CALLS] [{{"name": "look", "arguments": {ARGUMENTS}, "id": "abcdefghi"}}, '
        '{"name": "stop", "arguments": {}, "id": "bcdefghij"}]',
    ),
    Published(
        "Hermes with the arguments before the name, vLLM's example",
        "<tool_call></tool_call> <tools> '\\n<tool_call>\\n' add_generation_prompt",
        "qwen25",
        None,
        f'\n<tool_call>\n{{ "arguments": {ARGUMENTS}, "name": "look"}}\n</tool_call> '
        '\n<tool_call>\n{ "arguments": {}, "name": "stop"}\n</tool_call> ',
    ),
    Published(
        "Llama 3.2, Llama 4 and Gemma 3 with calls as in Python, vLLM's examples",
        "<|start_header_id|> [func_name1(params_name1=params_value1) add_generation_prompt",
        "pythonic",
        None,
        "[look(city='Ōsaka', days=3), stop()]",
    ),
    Published(
        "LFM2 with JSON, llama.cpp's",
        "List of tools: <|tool_list_start|>[ <|tool_response_start|> add_generation_prompt",
        "lfm2",
        None,
        f'<|tool_call_start|>[{{"name": "look", "arguments": {ARGUMENTS}, "id": "1"}}, '
        '{"name": "stop", "arguments": {}}]<|tool_call_end|>',
    ),
    Published(
        "Llama 4 with JSON, vLLM's example",
        """<|header_start|> {"name": function name, "parameters": dictionary} "; ".""",
        "llama4",
        None,
        f'{{"name": "look", "parameters": {ARGUMENTS}}}; {{"name": "stop", "parameters": {{}}}}',
    ),
    Published(
        "Phi-4-mini, vLLM's example",
        'formatted as functools[{"name": [function name], "arguments": [function arguments as JSON]}, ...]',
        "phi4",
        None,
        f'functools[{{"name": "look", "arguments": {ARGUMENTS}}}, {{"name": "stop", "arguments": {{}}}}]',
    ),
    Published(
        "xLAM, vLLM's examples",
        '[{"name": "tool_call_name", "arguments": {"arg1": "value1", "arg2": "value2"}}, ...]',
        "json",
        None,
        f'[{{"name": "look", "arguments": {ARGUMENTS}}}, {{"name": "stop", "arguments": {{}}}}]',
    ),
    Published(
        "MiniMax M1, vLLM's example",
        "<tool_calls> ... </tool_calls>",
        "hunyuan",
        None,
        f'<tool_calls>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n'
        '{"name": "stop", "arguments": {}}\n</tool_calls>',
    ),
]


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.source)
def test_published_format_is_guessed_and_read(published: Published) -> None:
    found = guess(TOOL_CALL_PARSERS, published.marks)
    assert found is not None
    assert found[0] == published.parser
    assert (guess(REASONING_PARSERS, published.marks) or (None,))[0] == published.reasoning
    parser = OutputParser(ParserSettings(calls=FORMATS[published.parser], tools=read_tools(TOOLS)))
    message = collect(parser.feed(published.output, final=True))
    assert [(call.name, json.loads(call.arguments)) for call in message.tool_calls] == CALLS
    assert message.content is None
