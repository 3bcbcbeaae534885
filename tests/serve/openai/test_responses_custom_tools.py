"""/v1/responses: custom tools, which the client runs, and summaries of reasoning."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

import fake_core
from served_core import Serve, Served

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SHELL: dict[str, Any] = {"type": "custom", "name": "shell", "description": "Run a command."}
PATCH = 'ls "a b"\necho é'
CALL = '<tool_call>\n{"name": "shell", "arguments": {"input": "ls \\"a b\\"\\necho é"}}\n</tool_call>'


@pytest.fixture
async def served(serve: Serve) -> Served:
    return await serve(text="<think>\nIs it?\n</think>\n\n" + CALL, tool_call_parser="qwen25", reasoning_parser="qwen3")


async def create(served: Served, **options: Any) -> Any:
    answer = await served.http.post("/v1/responses", json={"model": fake_core.MODEL, "input": "Hello", **options})
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json(), strict=True)
    return answer.json()


async def events(served: Served, **options: Any) -> list[dict[str, Any]]:
    body = {"model": fake_core.MODEL, "input": "Hello", "stream": True, **options}
    answer = await served.http.post("/v1/responses", json=body)
    frames = answer.text.removesuffix("\n\n").split("\n\n")
    found = [json.loads(frame.partition("\n")[2].removeprefix("data: ")) for frame in frames]
    for number, event in enumerate(found):
        assert event["sequence_number"] == number
        EVENT.validate_python(event, strict=True)
    return found


async def test_the_input_of_a_custom_tool_is_text(served: Served) -> None:
    answer = await create(served, tools=[SHELL])
    _, call = answer["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "shell", PATCH)
    assert answer["tools"] == [{**SHELL, "format": {"type": "text"}}]


async def test_a_streamed_call_ends_with_the_same_item(served: Served) -> None:
    found = await events(served, tools=[SHELL])
    kinds = [event["type"] for event in found]
    assert kinds.count("response.custom_tool_call_input.done") == 1
    assert "response.function_call_arguments.delta" not in kinds
    deltas = [event["delta"] for event in found if event["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(deltas) == PATCH
    assert found[-1]["response"]["output"][1]["input"] == PATCH


async def test_a_conversation_goes_on_after_the_result(served: Served) -> None:
    first = await create(served, tools=[SHELL])
    call = first["output"][1]
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "no such file"}
    await create(served, tools=[SHELL], previous_response_id=first["id"], input=[result])
    whole = [{"role": "user", "content": "Hello"}, *first["output"], result]
    await create(served, tools=[SHELL], input=whole)
    _, stored, sent = served.core.submitted
    assert stored.text == sent.text
    assert "no such file" in (sent.text or "")
    assert "echo" in (sent.text or "")


async def test_a_regex_is_enforced_and_lark_is_refused(served: Served) -> None:
    regex = {**SHELL, "format": {"type": "grammar", "syntax": "regex", "definition": "ls|pwd"}}
    await create(served, tools=[regex], tool_choice={"type": "custom", "name": "shell"})
    [request] = served.core.submitted
    assert request.grammar is not None
    assert "(?:ls|pwd)" in request.grammar.source
    lark = {**SHELL, "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}}
    answer = await served.http.post("/v1/responses", json={"input": "Hello", "tools": [lark]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools.0.format.syntax")
    answer = await served.http.post("/v1/responses", json={"input": "Hello", "tools": [{"type": "file_search"}]})
    assert "this server does not run tools" in answer.json()["error"]["message"]


async def test_a_summary_is_the_reasoning_where_it_is_asked_for(served: Served) -> None:
    plain = await create(served)
    assert plain["output"][0]["summary"] == []
    answer = await create(served, reasoning={"summary": "auto"})
    assert answer["output"][0]["summary"] == [{"type": "summary_text", "text": "Is it?"}]
    assert answer["reasoning"]["summary"] == "auto"
    found = await events(served, reasoning={"summary": "detailed"})
    text = [event["delta"] for event in found if event["type"] == "response.reasoning_summary_text.delta"]
    assert "".join(text) == "Is it?"
    assert found[-1]["response"]["output"][0]["summary"] == [{"type": "summary_text", "text": "Is it?"}]
    wrong = await served.http.post("/v1/responses", json={"input": "Hello", "reasoning": {"summary": "long"}})
    assert wrong.json()["error"]["param"] == "reasoning.summary"


async def test_functions_of_a_namespace_are_called_with_it(serve: Serve) -> None:
    """Codex offers sub-agents as a namespace, web search, and metadata of its own."""
    call = '<tool_call>\n{"name": "agents.spawn", "arguments": {"task": "x"}}\n</tool_call>'
    served = await serve(text=call, tool_call_parser="qwen25")
    spawn = {"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {"task": {}}}}
    space = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [spawn]}
    body = {"tools": [space, {"type": "web_search", "external_web_access": False}], "client_metadata": {"a": "b"}}
    answer = await served.http.post("/v1/responses", json={"input": "Hello", **body})
    assert answer.status_code == 200, answer.text
    [item] = answer.json()["output"]
    assert (item["namespace"], item["name"]) == ("agents", "spawn")
    assert [tool["type"] for tool in answer.json()["tools"]] == ["namespace"]
    found = await events(served, **body)
    assert found[-1]["response"]["output"][0]["namespace"] == "agents"
    result = {"type": "function_call_output", "call_id": item["call_id"], "output": "done"}
    again = await served.http.post("/v1/responses", json={"input": ["x", item, result][1:], **body})
    assert again.status_code == 200, again.text
    assert "agents.spawn" in (served.core.submitted[-1].text or "")
