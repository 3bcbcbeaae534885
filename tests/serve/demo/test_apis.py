"""The demo model calls a real function, reasons and answers in every chat API, with each API's own client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import jsonschema
import ollama
import openai
import pytest

import http_server
from serve import Engine
from serve.server.app import build_app

QUESTION: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
SUM: list[Any] = [{"role": "user", "content": "What is 38 + 57?"}]
TOLD = "In Oslo it is 21 degrees and sunny."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": SCHEMA,
}


def get_weather(city: str) -> str:
    assert city == "Oslo"
    return json.dumps({"temperature": 21, "condition": "sunny"})


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with Engine() as engine, http_server.serving(build_app(engine.core)) as address:
        yield address


async def test_chat_completions(url: str) -> None:
    tool: Any = {"type": "function", "function": FUNCTION}
    messages = list(QUESTION)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        ask: Any = {"model": "default", "tools": [tool], "temperature": 0, "max_tokens": 100}
        first: Any = (await client.chat.completions.create(messages=messages, **ask)).choices[0]
        [call] = first.message.tool_calls
        output = get_weather(**json.loads(call.function.arguments))
        messages += [first.message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": output}]
        second: Any = (await client.chat.completions.create(messages=messages, **ask)).choices[0]
    assert (first.finish_reason, second.finish_reason) == ("tool_calls", "stop")
    assert second.message.content == TOLD


async def test_responses(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        responses: Any = client.responses
        ask = {"model": "default", "tools": [{"type": "function", **FUNCTION}], "temperature": 0}
        first = await responses.create(input=QUESTION, **ask)
        [call] = first.output
        result = {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": get_weather(**json.loads(call.arguments)),
        }
        second = await responses.create(input=[result], previous_response_id=first.id, **ask)
        assert second.output_text == TOLD
        assert second.usage.input_tokens_details.cached_tokens > 64  # the pages of the first turn
        async with responses.stream(model="default", input=SUM, temperature=0, reasoning={"effort": "low"}) as stream:
            thought = await stream.get_final_response()
    assert [item.type for item in thought.output] == ["reasoning", "message"]
    assert "95" in thought.output_text
    assert 0 < thought.usage.output_tokens_details.reasoning_tokens < thought.usage.output_tokens


async def test_messages(url: str) -> None:
    tools: Any = [{**FUNCTION, "input_schema": SCHEMA}]
    messages = list(QUESTION)
    ask: Any = {"model": "default", "max_tokens": 300, "extra_body": {"temperature": 0}}
    async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
        first: Any = await client.messages.create(messages=messages, tools=tools, **ask)
        [use] = first.content
        result = {"type": "tool_result", "tool_use_id": use.id, "content": get_weather(**use.input)}
        messages += [
            {"role": "assistant", "content": [block.to_dict() for block in first.content]},
            {"role": "user", "content": [result]},
        ]
        second: Any = await client.messages.create(messages=messages, tools=tools, **ask)
        assert (second.stop_reason, second.content[0].text) == ("end_turn", TOLD)
        async with client.messages.stream(messages=SUM, thinking={"type": "adaptive"}, **ask) as stream:
            thought: Any = await stream.get_final_message()
    assert [block.type for block in thought.content] == ["thinking", "text"]
    assert "95" in thought.content[1].text


async def test_ollama(url: str) -> None:
    client = ollama.AsyncClient(host=url)
    messages: list[Any] = list(QUESTION)
    tools = [{"type": "function", "function": FUNCTION}]
    first = await client.chat("default", messages, tools=tools, options={"temperature": 0})
    call = (first.message.tool_calls or [])[0]
    output = get_weather(**call.function.arguments)
    messages += [first.message, {"role": "tool", "tool_name": call.function.name, "content": output}]
    second = await client.chat("default", messages, tools=tools, options={"temperature": 0})
    assert second.message.content == TOLD
    parts = [
        part async for part in await client.chat("default", SUM, think=True, stream=True, options={"temperature": 0})
    ]
    assert "carry" in "".join(part.message.thinking or "" for part in parts)
    assert "95" in "".join(part.message.content or "" for part in parts)


CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "large": {"type": "boolean"}},
    "required": ["name", "large"],
    "additionalProperties": False,
}


async def test_answers_match_a_schema(url: str) -> None:
    named: Any = {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}
    question: list[Any] = [{"role": "user", "content": "Name a city."}]
    async with (
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as other,
    ):
        response = await client.responses.create(model="default", input="Name a city.", text={"format": named})
        output: Any = {"format": {"type": "json_schema", "schema": CITY}}
        message: Any = await other.messages.create(
            model="default", max_tokens=100, messages=question, output_config=output
        )
    answer = await ollama.AsyncClient(host=url).chat("default", question, format=CITY)
    for text in (response.output_text, message.content[0].text, answer.message.content or ""):
        jsonschema.validate(json.loads(text), CITY)
