"""`functions` and `function_call`, the older form of tools, with the official client and a scripted model."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import fake_core
from served_core import Serve, Served
from tool_call_texts import CALLS, TEXTS, TOOLS

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
FUNCTIONS: list[Any] = [tool["function"] for tool in TOOLS]


@pytest.fixture
async def served(serve: Serve) -> Served:
    return await serve(text=TEXTS["qwen25"], tool_call_parser="qwen25")


async def chat(served: Served, **options: Any) -> Any:
    given = {"model": fake_core.MODEL, "messages": HELLO, "max_tokens": 400, **options}
    return await served.openai.chat.completions.create(**given)


async def test_a_call_is_answered_in_the_same_form(served: Served) -> None:
    name, arguments = CALLS[0]
    answer = await chat(served, functions=FUNCTIONS)
    ChatCompletion.model_validate_json(answer.model_dump_json(), strict=True)
    [choice] = answer.choices
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None
    called = choice.message.function_call
    assert (called.name, json.loads(called.arguments)) == (name, arguments)


async def test_a_streamed_call_has_the_same_form(served: Served) -> None:
    chunks = [chunk async for chunk in await chat(served, functions=FUNCTIONS, stream=True)]
    for chunk in chunks:
        ChatCompletionChunk.model_validate_json(chunk.model_dump_json(), strict=True)
    calls = [chunk.choices[0].delta.function_call for chunk in chunks if chunk.choices[0].delta.function_call]
    assert [call.name for call in calls if call.name] == [CALLS[0][0]]
    assert json.loads("".join(call.arguments for call in calls)) == CALLS[0][1]
    assert chunks[-1].choices[0].finish_reason == "function_call"
    assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks)


async def test_the_template_sees_tools_calls_and_results(served: Served) -> None:
    name, arguments = CALLS[0]
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "function_call": {"name": name, "arguments": json.dumps(arguments)}},
        {"role": "function", "name": name, "content": "sunny"},
    ]
    tool_calls = [{"id": "call_1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}]
    newer = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": tool_calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny", "name": name},
    ]
    await chat(served, functions=FUNCTIONS, messages=messages)
    await chat(served, tools=TOOLS, messages=newer, parallel_tool_calls=False)
    old, new = served.core.submitted
    assert old.text == new.text
    assert "sunny" in (old.text or "")


@pytest.mark.parametrize(
    ("choice", "tool_choice"),
    [
        ("none", "none"),
        ("auto", "auto"),
        ({"name": CALLS[0][0]}, {"type": "function", "function": {"name": CALLS[0][0]}}),
    ],
)
async def test_the_choice_is_that_of_tools(served: Served, choice: Any, tool_choice: Any) -> None:
    await chat(served, functions=FUNCTIONS, function_call=choice)
    await chat(served, tools=TOOLS, tool_choice=tool_choice, parallel_tool_calls=False)
    old, new = served.core.submitted
    assert (old.text, old.grammar) == (new.text, new.grammar)
