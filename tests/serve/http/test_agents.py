"""Tools, reasoning and two-turn loops in the Anthropic, Responses and Ollama APIs, with their clients."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import ollama
import orjson
import pytest
from anthropic.types import ModelInfo, RawMessageStreamEvent
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

import fake_core
from served_core import Serve, Served
from tool_call_texts import CALLS, TEXTS, TOOLS

TEXT = "<think>\nIs it?\n</think>\n\n" + TEXTS["qwen25"]
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
FUNCTIONS = [tool["function"] for tool in TOOLS]
ANTHROPIC_TOOLS: list[Any] = [
    {
        "name": f["name"],
        "description": f.get("description", ""),
        "input_schema": f.get("parameters") or {"type": "object"},
    }
    for f in FUNCTIONS
]
RESPONSES_TOOLS: list[Any] = [{"type": "function", "strict": False, **f} for f in FUNCTIONS]
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)
RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@pytest.fixture
async def served(serve: Serve) -> Served:
    return await serve(text=TEXT, tool_call_parser="qwen25", reasoning_parser="qwen3")


def anthropic_of(served: Served) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0)


def frames(text: str) -> list[dict[str, Any]]:
    return [orjson.loads(frame.partition("\ndata: ")[2]) for frame in text.removesuffix("\n\n").split("\n\n")]


# --- Anthropic ---


async def test_message_has_thinking_text_and_tool_use(served: Served) -> None:
    async with anthropic_of(served) as client:
        answer: Any = await client.messages.create(
            model=fake_core.MODEL,
            messages=HELLO,
            max_tokens=400,
            tools=ANTHROPIC_TOOLS,
            thinking={"type": "adaptive"},
        )
    thinking, text, *uses = answer.content
    assert (thinking.type, thinking.thinking.strip(), bool(thinking.signature)) == (
        "thinking",
        "Is it?",
        True,
    )
    assert (text.type, text.text.strip()) == ("text", "Hi there.")
    assert [(use.name, use.input) for use in uses] == CALLS
    assert len({use.id for use in uses}) == 2
    assert answer.stop_reason == "tool_use"
    assert answer.usage.output_tokens_details.thinking_tokens > 0


async def test_anthropics_client_finds_the_model(served: Served) -> None:
    async with anthropic_of(served) as client:
        [model] = [model async for model in client.models.list()]
        again = await client.models.retrieve(fake_core.MODEL)
    assert (model.type, model.id, model.max_input_tokens) == ("model", fake_core.MODEL, fake_core.CONTEXT)
    assert again == model
    ModelInfo.model_validate_json(again.to_json(), strict=True)


async def test_anthropics_tool_runner_goes_on_without_a_thread_of_the_servers(served: Served) -> None:
    asked: list[str] = []

    @anthropic.beta_async_tool
    async def get_weather(city: str, **further: Any) -> str:
        """The weather of a city."""
        asked.append(city)
        return "sunny"

    async with anthropic_of(served) as client:
        runner = client.beta.messages.tool_runner(
            model=fake_core.MODEL, messages=HELLO, max_tokens=400, tools=[get_weather], max_iterations=2
        )
        answers = [answer async for answer in runner]
    assert len(answers) == 2
    assert len(served.core.submitted) == 2
    assert asked[0] == CALLS[0][1]["city"]


async def test_anthropics_accumulator_reads_the_stream(served: Served) -> None:
    ask: Any = {"model": fake_core.MODEL, "messages": HELLO, "max_tokens": 400, "tools": ANTHROPIC_TOOLS}
    async with anthropic_of(served) as client, client.messages.stream(**ask) as stream:
        final: Any = await stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert [(use.name, use.input) for use in final.content[2:]] == CALLS
    assert final.stop_reason == "tool_use"
    response = await served.http.post("/v1/messages", json={**ask, "stream": True})
    found = frames(response.text)
    for event in found:
        MESSAGE_EVENT.validate_python(event, strict=True)
    opened = [event["index"] for event in found if event["type"] == "content_block_start"]
    closed = [event["index"] for event in found if event["type"] == "content_block_stop"]
    assert opened == closed == [0, 1, 2, 3]
    pieces = [e["delta"]["partial_json"] for e in found if e.get("delta", {}).get("type") == "input_json_delta"]
    assert len(pieces) > 4, "arguments stream"


async def test_tool_use_that_is_cut_off_is_left_out(serve: Serve) -> None:
    text = TEXTS["qwen25"]
    served = await serve(text=text, tool_call_parser="qwen25")
    num_tokens = len(served.core.tokenizer.encode_batch([text[: text.index("days")]], add_special_tokens=False)[0])
    async with anthropic_of(served) as client:
        answer: Any = await client.messages.create(
            model=fake_core.MODEL, messages=HELLO, max_tokens=num_tokens, tools=ANTHROPIC_TOOLS
        )
    assert answer.stop_reason == "max_tokens"
    assert [block.type for block in answer.content] == ["text"]


async def test_one_tool_use_where_parallel_ones_are_off(served: Served) -> None:
    async with anthropic_of(served) as client:
        answer: Any = await client.messages.create(
            model=fake_core.MODEL,
            messages=HELLO,
            max_tokens=400,
            tools=ANTHROPIC_TOOLS,
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        )
    assert [block.type for block in answer.content].count("tool_use") == 1


# --- Responses ---


async def test_response_has_items_of_all_kinds(served: Served) -> None:
    answer = await served.openai.responses.create(
        model=fake_core.MODEL, input="Hello", tools=RESPONSES_TOOLS, max_output_tokens=400
    )
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call", "function_call"]
    reasoning, _, *calls = answer.output
    assert reasoning.content[0].text.strip() == "Is it?"  # type: ignore[union-attr]
    assert answer.output_text.strip() == "Hi there."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == CALLS  # type: ignore[union-attr]
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens > 0


async def test_responses_events_of_all_kinds_are_in_order(served: Served) -> None:
    ask: Any = {"model": fake_core.MODEL, "input": "Hello", "tools": RESPONSES_TOOLS, "stream": True}
    response = await served.http.post("/v1/responses", json=ask)
    found = frames(response.text)
    for number, event in enumerate(found):
        RESPONSE_EVENT.validate_python(event, strict=True)
        assert event["sequence_number"] == number
    kinds = [event["type"].removeprefix("response.") for event in found]
    order = [kind for i, kind in enumerate(kinds) if not (kind.endswith(".delta") and kinds[i - 1] == kind)]
    item = ["output_item.added", "content_part.added"], ["content_part.done", "output_item.done"]
    call = [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    assert order == [
        "created",
        "in_progress",
        *item[0],
        "reasoning_text.delta",
        "reasoning_text.done",
        *item[1],
        *item[0],
        "output_text.delta",
        "output_text.done",
        *item[1],
        *call,
        *call,
        "completed",
    ]
    done = [event["item"] for event in found if event["type"] == "response.output_item.done"]
    assert found[-1]["response"]["output"] == done
    async with served.openai.responses.stream(model=fake_core.MODEL, input="Hello", tools=RESPONSES_TOOLS) as stream:
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]


# --- Ollama ---


async def test_ollama_message_has_thinking_and_calls(served: Served) -> None:
    client = ollama.AsyncClient(host=served.url)
    answer = await client.chat(fake_core.MODEL, HELLO, tools=TOOLS, think=True)
    message = answer.message
    assert ((message.thinking or "").strip(), (message.content or "").strip()) == ("Is it?", "Hi there.")
    assert [(c.function.name, dict(c.function.arguments)) for c in message.tool_calls or ()] == CALLS
    parts = [part async for part in await client.chat(fake_core.MODEL, HELLO, tools=TOOLS, stream=True)]
    assert "".join(part.message.thinking or "" for part in parts) == message.thinking
    assert "".join(part.message.content or "" for part in parts) == message.content
    calls = [call for part in parts for call in part.message.tool_calls or ()]
    assert [(call.function.name, dict(call.function.arguments)) for call in calls] == CALLS


async def test_ollama_describes_what_the_server_can(served: Served) -> None:
    shown = await ollama.AsyncClient(host=served.url).show(fake_core.MODEL)
    assert set(shown.capabilities or ()) == {"completion", "tools", "thinking"}


# --- a two-turn loop with a real function ---


def get_weather(city: str) -> str:
    return f"sunny in {city}"


def _script(served: Served) -> None:
    """Script the model: it calls the function, and reports the result when it has one."""
    core = served.core
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    core._ids_of = lambda request, index: core._encode(
        "It is sunny." if "sunny in Oslo" in (request.text or "") else call
    )


async def test_loop_over_messages(served: Served) -> None:
    _script(served)
    messages = list(HELLO)
    ask: Any = {"model": fake_core.MODEL, "max_tokens": 200, "tools": ANTHROPIC_TOOLS}
    async with anthropic_of(served) as client:
        first: Any = await client.messages.create(messages=messages, **ask)
        [use] = first.content
        result = {"type": "tool_result", "tool_use_id": use.id, "content": get_weather(**use.input)}
        messages += [
            {"role": "assistant", "content": [block.to_dict() for block in first.content]},
            {"role": "user", "content": [result]},
        ]
        second: Any = await client.messages.create(messages=messages, **ask)
    assert (second.stop_reason, second.content[0].text) == ("end_turn", "It is sunny.")


async def test_loop_over_responses(served: Served) -> None:
    _script(served)
    responses: Any = served.openai.responses
    ask = {"model": fake_core.MODEL, "tools": RESPONSES_TOOLS}
    first = await responses.create(input="Weather?", **ask)
    [call] = first.output
    output = get_weather(**json.loads(call.arguments))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": output}
    second = await responses.create(input=[result], previous_response_id=first.id, **ask)
    stateless = await responses.create(
        input=[{"role": "user", "content": "Weather?"}, call.to_dict(), result], store=False, **ask
    )
    assert second.output_text == stateless.output_text == "It is sunny."


async def test_loop_over_ollama(served: Served) -> None:
    _script(served)
    client = ollama.AsyncClient(host=served.url)
    messages: list[Any] = list(HELLO)
    first = await client.chat(fake_core.MODEL, messages, tools=[get_weather])
    call = (first.message.tool_calls or [])[0]
    output = get_weather(**call.function.arguments)
    messages += [first.message, {"role": "tool", "tool_name": call.function.name, "content": output}]
    second = await client.chat(fake_core.MODEL, messages, tools=[get_weather])
    assert second.message.content == "It is sunny."
