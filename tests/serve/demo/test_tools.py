"""The demo model calls tools and reasons, with the official client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import jsonschema
import openai
import pytest

import http_server
from demo_model.skills.tools import TOOLS as SKILLS
from serve import Engine
from serve.calls.chat.events import collect
from serve.calls.chat.parser import OutputParser, ParserSettings
from serve.calls.chat.reasoning import FORMATS as REASONING
from serve.calls.chat.tools.offered import read_tools
from serve.calls.chat.tools.table import FORMATS
from serve.server.app import build_app

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
    first = await client.chat.completions.create(model="default", messages=messages, tools=TOOLS, temperature=0)
    [choice] = first.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    messages.append(choice.message.model_dump(exclude_none=True))
    for call in choice.message.tool_calls or ():
        assert call.type == "function"
        result = get_weather(**json.loads(call.function.arguments))
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    second = await client.chat.completions.create(model="default", messages=messages, tools=TOOLS, temperature=0)
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
    assert [(call.function.name, call.function.arguments) for call in whole.tool_calls] == [(names[0], arguments)]
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
    plan = engine.core.plan.tokenizer
    settings = ParserSettings(
        calls=FORMATS[plan.tool_call_parser or ""],
        reasoning=REASONING[plan.reasoning_parser or ""],
        tools=read_tools(TOOLS),
    )
    read = collect(OutputParser(settings).feed(output, final=True))
    assert (read.content, read.reasoning) == (message["content"], message["reasoning_content"])
    assert [{"name": call.name, "arguments": json.loads(call.arguments)} for call in read.tool_calls] == calls


async def check_required(client: Any, count: int) -> None:
    """Ask held-out questions at temperature 1, half of them with reasoning. Each answer must be exactly one valid
    call.
    """
    rng = Random(count)

    async def ask(number: int) -> None:
        skill = rng.choice(SKILLS)
        offered = [skill, *rng.sample([other for other in SKILLS if other is not skill], 2)]
        rng.shuffle(offered)
        schemas = {tool.name: tool.schema()["parameters"] for tool in offered}
        answer = await client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": rng.choice(skill.asked.held).format(**skill.draw(rng))}],
            tools=[{"type": "function", "function": tool.schema()} for tool in offered],
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=1,
            seed=number,
            max_tokens=300,
            extra_body={"chat_template_kwargs": {"enable_thinking": number % 2 == 1}},
        )
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls
        jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])

    await asyncio.gather(*(ask(number) for number in range(count)))


async def test_required_calls_are_valid_by_their_schemas(client: Any) -> None:
    await check_required(client, 24)


@pytest.mark.slow
async def test_many_required_calls_are_valid_by_their_schemas(client: Any) -> None:
    await check_required(client, 200)


async def test_named_tool_is_called(client: Any) -> None:
    answer = await client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Hello!"}],
        tools=TOOLS,
        tool_choice={"type": "function", "function": {"name": "get_weather"}},
        parallel_tool_calls=False,
        temperature=0,
    )
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])


async def test_strict_tools_leave_answers_free_and_hold_calls(client: Any) -> None:
    function = {**TOOLS[0]["function"], "strict": True}
    function["parameters"] = {**function["parameters"], "additionalProperties": False}
    ask: Any = {"model": "default", "tools": [{"type": "function", "function": function}], "temperature": 0}
    called = await client.chat.completions.create(messages=[QUESTION], **ask)
    [call] = called.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    hello: Any = [{"role": "user", "content": "Hello!"}]
    free = await client.chat.completions.create(messages=hello, **ask)
    assert free.choices[0].finish_reason == "stop"
    assert free.choices[0].message.content
    assert not free.choices[0].message.tool_calls


async def test_calls_name_offered_tools_though_tokens_are_drawn(client: Any) -> None:
    offered = {"zebra_index", "zebra_index_of"}
    tools: Any = [{"type": "function", "function": {**TOOLS[0]["function"], "name": name}} for name in offered]
    ask: dict[str, Any] = {"model": "default", "messages": [QUESTION], "tools": tools, "max_tokens": 60}
    for more in ({}, {"max_thinking_tokens": 20, "chat_template_kwargs": {"enable_thinking": True}}):
        answer = await client.chat.completions.create(**ask, n=16, temperature=1.6, seed=5, extra_body=more)
        calls = [call for choice in answer.choices for call in choice.message.tool_calls or ()]
        assert calls
        assert {call.function.name for call in calls} <= offered
        assert {choice.finish_reason for choice in answer.choices} <= {"stop", "length", "tool_calls"}
    text = await client.chat.completions.create(**ask | {"messages": [{"role": "user", "content": "Hello"}]})
    assert text.choices[0].finish_reason == "stop"
    assert text.choices[0].message.content


async def test_tools_need_no_grammar_backend() -> None:
    async with Engine(grammar_backend="none") as engine:
        answer = await engine.chat([QUESTION], tools=TOOLS, temperature=0)
        assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"
    async with Engine() as engine:
        answer = await engine.chat([QUESTION], tools=TOOLS, temperature=0, allowed_token_ids=list(range(4096)))
        assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"
