"""The embedded model thinks as long as it may, and answers in JSON behind its thoughts."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

import http_server
from serve import Engine
from serve.server.app import build_app

ASK: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "What is 17 + 25?"}],
    "temperature": 0,
    "max_tokens": 200,
}
THINKS: Any = {"chat_template_kwargs": {"enable_thinking": True}}
SCHEMA: Any = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}},
    "required": ["answer"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA, "strict": True}}


async def test_variables_of_the_template_have_defaults_of_the_server() -> None:
    async with Engine(default_chat_template_kwargs={"enable_thinking": True}) as engine:
        for asked, thinks in (({}, True), ({"enable_thinking": False}, False), ({"other": 1}, True)):
            answer = await engine.chat(ASK["messages"], temperature=0, max_tokens=200, chat_template_kwargs=asked)
            assert bool(answer.choices[0].message.reasoning_content) is thinks, asked


async def test_thoughts_end_where_they_must() -> None:
    async with Engine() as engine:
        full = await engine.chat(ASK["messages"], temperature=0, max_tokens=200, **THINKS)
        length = full.usage.completion_tokens_details.reasoning_tokens
        assert length > 6
        for budget in (0, 1, 5, length + 10):
            told = {"temperature": 0, "max_tokens": 200, "max_thinking_tokens": budget, **THINKS}
            answer = await engine.chat(ASK["messages"], **told)
            # The opening mark and the closing one are counted, too, and are no part of the budget.
            used = answer.usage.completion_tokens_details.reasoning_tokens
            assert used == min(budget + 2, length), (budget, used)
            assert answer.choices[0].message.content
            if budget > length:
                assert answer.choices[0].message.content == full.choices[0].message.content
            else:
                whole = full.choices[0].message.reasoning_content
                assert whole.startswith((answer.choices[0].message.reasoning_content or "").rstrip("\n"))


async def test_budget_goes_with_grammars_choices_and_other_apis() -> None:
    tools: Any = [{"type": "function", "function": {"name": "solve", "parameters": SCHEMA, "strict": True}}]
    async with Engine() as engine, http_server.serving(build_app(engine.core)) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        limited = {**THINKS, "max_thinking_tokens": 4}
        given = {**ASK, "n": 2, "temperature": 1, "seed": 3, "extra_body": limited}
        answer = await client.chat.completions.create(**given, response_format=FORMAT)
        for choice in answer.choices:
            assert choice.finish_reason == "stop"
            assert isinstance(json.loads(choice.message.content or "")["answer"], int)
        assert answer.usage.completion_tokens_details.reasoning_tokens <= 12
        called = await client.chat.completions.create(**given, tools=tools, tool_choice="required")
        for choice in called.choices:
            [call] = choice.message.tool_calls
            assert isinstance(json.loads(call.function.arguments)["answer"], int)
        assert called.usage.completion_tokens_details.reasoning_tokens <= 12
        claude = anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
        message = await claude.messages.create(
            model="default",
            messages=ASK["messages"],
            max_tokens=200,
            thinking={"type": "enabled", "budget_tokens": 3},
        )
        assert [block.type for block in message.content] == ["thinking", "text"]


async def test_thoughts_come_before_json() -> None:
    async with Engine() as engine:
        thought = await engine.chat(ASK["messages"], temperature=0, max_tokens=200, response_format=FORMAT, **THINKS)
        message = thought.choices[0].message
        assert message.reasoning_content
        assert isinstance(json.loads(message.content)["answer"], int)
        plain = await engine.chat(ASK["messages"], temperature=0, max_tokens=200, response_format=FORMAT)
        assert isinstance(json.loads(plain.choices[0].message.content)["answer"], int)


async def test_budget_without_grammars_is_refused() -> None:
    async with Engine(grammar_backend="none") as engine:
        with pytest.raises(Exception, match="cannot constrain outputs"):
            await engine.chat(ASK["messages"], max_thinking_tokens=4, **THINKS)
