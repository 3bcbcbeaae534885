"""The embedded model calls tools and thinks, through the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

import http_server
from serve import Engine
from serve.app import build_app
from serve.chat.message import collect
from serve.chat.parser import OutputParser, ParserSettings
from serve.chat.reasoning.table import FORMATS as REASONING
from serve.chat.tools.offered import read_tools
from serve.chat.tools.table import FORMATS

TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    }
]
QUESTION: Any = {"role": "user", "content": "What is the weather in Oslo?"}


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    async with Engine() as engine:
        yield engine


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        http_server.serving(build_app(engine.core)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def get_weather(city: str) -> dict[str, Any]:
    return {"temperature": 7, "sky": f"rainy in {city}"}


async def test_two_turns_with_a_function_that_is_called(client: Any) -> None:
    messages: list[Any] = [QUESTION]
    first = await client.chat.completions.create(
        model="default", messages=messages, tools=TOOLS, temperature=0
    )
    [choice] = first.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    messages.append(choice.message.model_dump(exclude_none=True))
    for call in choice.message.tool_calls or ():
        assert call.type == "function"
        result = get_weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    second = await client.chat.completions.create(
        model="default", messages=messages, tools=TOOLS, temperature=0
    )
    assert second.choices[0].finish_reason == "stop"
    assert "7" in (second.choices[0].message.content or "")


@pytest.mark.parametrize("thinks", [False, True])
async def test_streamed_calls_and_thoughts_are_those_of_the_whole_answer(client: Any, thinks: bool) -> None:
    ask: Any = {
        "model": "default",
        "messages": [QUESTION],
        "tools": TOOLS,
        "temperature": 0,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": thinks}},
    }
    whole: Any = (await client.chat.completions.create(**ask)).choices[0].message
    stream = await client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    arguments, names, thought = "", [], ""
    usage: Any = None
    async for chunk in stream:
        usage = chunk.usage or usage
        for delta in [choice.delta for choice in chunk.choices]:
            thought += getattr(delta, "reasoning_content", None) or ""
            assert not delta.content
            for call in delta.tool_calls or ():
                arguments += call.function.arguments
                names += [call.function.name] if call.function.name else []
    assert [(call.function.name, call.function.arguments) for call in whole.tool_calls] == [
        (names[0], arguments)
    ]
    assert json.loads(arguments) == {"city": "Oslo"}
    assert (thought or None) == whole.reasoning_content
    assert bool(thought) is thinks
    details = usage.completion_tokens_details
    assert (details.reasoning_tokens > 0) if thinks else details is None


async def test_what_the_template_writes_is_read_back(engine: Engine) -> None:
    calls: list[Any] = [
        {
            "name": "get_weather",
            "arguments": {"city": 'S"{o} </tool_call>\nPaulo 🚀', "deep": [{"a": None}, 1.5]},
        },
        {"name": "other", "arguments": {}},
    ]
    message: Any = {
        "role": "assistant",
        "content": "Let me look.",
        "reasoning_content": "Hm.\n\nYes",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }
    tokenizer = engine.core.tokenizer
    assert tokenizer is not None
    assert tokenizer.template is not None
    prompt = tokenizer.template.render([QUESTION], tools=TOOLS, enable_thinking=True)
    whole = tokenizer.template.render([QUESTION, message], tools=TOOLS, add_generation_prompt=False)
    output = whole.removeprefix(prompt).removesuffix("<|im_end|>\n")
    assert whole.startswith(prompt)
    plan = engine.core.plan.text
    settings = ParserSettings(
        calls=FORMATS[plan.tool_call_parser or ""],
        reasoning=REASONING[plan.reasoning_parser or ""],
        tools=read_tools(TOOLS),
    )
    read = collect(OutputParser(settings).feed(output, final=True))
    assert (read.content, read.reasoning) == (message["content"], message["reasoning_content"])
    assert [{"name": call.name, "arguments": json.loads(call.arguments)} for call in read.tool_calls] == calls
