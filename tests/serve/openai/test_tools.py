"""Tool calls and reasoning over HTTP with the official client and a scripted model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import fake_core
import tiny_tokenizers
from runtime.config.plan import TokenizerPlan
from runtime.tokenizer.tokenizer import Tokenizer
from served_core import Serve, Served
from tool_call_texts import CALLS, TEXTS, TOOLS

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
THOUGHT = "<think>\nIs it?\n</think>\n\n"
TEXT = THOUGHT + TEXTS["qwen25"]


@pytest.fixture
async def served(serve: Serve) -> Served:
    return await serve(text=TEXT, tool_call_parser="qwen25", reasoning_parser="qwen3")


async def chat(served: Served, **options: Any) -> Any:
    given = {"model": fake_core.MODEL, "messages": HELLO, "max_tokens": 400, **options}
    return await served.openai.chat.completions.create(**given)


async def test_message_has_calls_reasoning_and_content(served: Served) -> None:
    [choice] = (await chat(served, tools=TOOLS)).choices
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert (message.content, message.reasoning_content) == ("Hi there.", "Is it?")
    assert [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls] == CALLS
    assert [call.type for call in message.tool_calls] == ["function", "function"]
    assert len({call.id for call in message.tool_calls}) == 2


async def test_content_is_null_beside_calls_alone(serve: Serve) -> None:
    served = await serve(text=TEXTS["json"], tool_call_parser="json")
    [choice] = (await chat(served, tools=TOOLS)).choices
    assert choice.message.content is None
    assert len(choice.message.tool_calls) == 2


async def test_stream_is_as_openai_writes_it(served: Served) -> None:
    stream = await chat(served, tools=TOOLS, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == "Hi there."
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Is it?"
    calls: dict[int, dict[str, str]] = {}
    for piece in [piece for delta in deltas for piece in delta.tool_calls or ()]:
        if piece.index not in calls:
            assert (piece.type, piece.function.arguments) == ("function", "")
            calls[piece.index] = {"id": piece.id, "name": piece.function.name, "arguments": ""}
        else:
            assert (piece.id, piece.type, piece.function.name) == (None, None, None)
            calls[piece.index]["arguments"] += piece.function.arguments
    assert [(call["name"], json.loads(call["arguments"])) for call in calls.values()] == CALLS
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "tool_calls"
    assert sum(bool(delta.tool_calls) for delta in deltas) > 10, "arguments stream"
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens > 0


async def test_answers_are_of_openais_types_to_the_letter(served: Served) -> None:
    ask = {"model": fake_core.MODEL, "messages": HELLO, "max_tokens": 400, "tools": TOOLS, "logprobs": True}
    whole = await served.http.post("/v1/chat/completions", json=ask)
    ChatCompletion.model_validate_json(whole.content, strict=True)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    streamed = await served.http.post("/v1/chat/completions", json={**ask, **options})
    *events, done, _ = streamed.text.split("\n\n")
    assert done == "data: [DONE]"
    assert len(events) > 20
    for event in events:
        ChatCompletionChunk.model_validate_json(event.removeprefix("data: "), strict=True)


async def test_openais_own_accumulator_reads_the_stream(served: Served) -> None:
    given: Any = {"model": fake_core.MODEL, "messages": HELLO, "max_tokens": 400, "tools": TOOLS}
    async with served.openai.chat.completions.stream(**given) as stream:
        final = await stream.get_final_completion()
    calls = final.choices[0].message.tool_calls or []
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == CALLS


async def test_logprobs_of_tokens_that_are_marks_are_told(served: Served) -> None:
    whole = await chat(served, tools=TOOLS, logprobs=True)
    chunks = [chunk async for chunk in await chat(served, tools=TOOLS, logprobs=True, stream=True)]
    streamed = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert streamed == whole.choices[0].logprobs.content


async def test_cut_off_output_ends_with_length(serve: Serve) -> None:
    text = TEXTS["qwen25"]
    served = await serve(text=text, tool_call_parser="qwen25")
    ids = served.core.tokenizer.encode_batch([text[: text.index("days")]], add_special_tokens=False)[0]
    [choice] = (await chat(served, tools=TOOLS, max_tokens=len(ids))).choices
    assert choice.finish_reason == "length"
    [call] = choice.message.tool_calls
    assert CALLS[0][1]["city"] in json.loads(call.function.arguments.rpartition(",")[0] + "}")["city"]


async def test_calls_are_text_where_none_is_wanted(served: Served) -> None:
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        [choice] = (await chat(served, **options)).choices
        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls is None
        assert choice.message.content == TEXTS["qwen25"]


async def test_tools_reach_the_template_unless_none_is_to_be_called(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def render(messages: Any, check: Any, **kwargs: Any) -> str:
        seen.append(kwargs.get("tools"))
        return "prompt"

    monkeypatch.setattr(served.core.tokenizer.template, "render", render)
    await chat(served, tools=TOOLS)
    await chat(served, tools=TOOLS, tool_choice="none")
    assert seen == [TOOLS, None]


async def test_one_call_where_they_may_not_be_parallel(served: Served) -> None:
    [choice] = (await chat(served, tools=TOOLS, parallel_tool_calls=False)).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]


async def test_reasoning_can_stay_in_the_text(served: Served) -> None:
    [choice] = (await chat(served, extra_body={"separate_reasoning": False})).choices
    assert (choice.message.content, choice.message.reasoning_content) == (TEXT, None)


async def test_reasoning_can_come_at_once(served: Served) -> None:
    stream = await chat(served, stream=True, extra_body={"stream_reasoning": False})
    deltas = [chunk.choices[0].delta async for chunk in stream]
    assert [d.reasoning_content for d in deltas if d.reasoning_content] == ["Is it?"]


async def test_block_that_the_prompt_closed_is_not_looked_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    template = served.core.tokenizer.template
    monkeypatch.setattr(template, "render", lambda *_, **__: "user\n<think>\n\n</think>\n\n")
    [choice] = (await chat(served)).choices
    assert choice.message.content == TEXT


async def test_calls_that_must_be_made_become_a_grammar(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    named: Any = {"type": "function", "function": {"name": "stop"}}
    await chat(served, tools=TOOLS)
    await chat(served, tools=TOOLS, tool_choice="required")
    monkeypatch.setattr(served.core.tokenizer.template, "render", lambda *_, **__: "user\n<think>\n")
    await chat(served, tools=TOOLS, tool_choice=named)
    grammars: list[Any] = [request.grammar for request in served.core.submitted]
    auto, required, only = grammars
    assert (auto.begins_after, auto.must_begin) == ("<tool_call>", False)
    assert (required.kind, required.begins_after, "get_weather" in required.source) == ("lark", None, True)
    assert (only.kind, only.begins_after, "get_weather" in only.source) == ("lark", "</think>", False)


async def test_gpt_oss_answers_in_json_on_its_channel_and_thinks_within_its_budget(serve: Serve) -> None:
    served = await serve(text="Yes.", tool_call_parser="gpt-oss", reasoning_parser="gpt-oss")
    schema = {"name": "city", "schema": {"type": "object", "properties": {"sunny": {"type": "boolean"}}}}
    wanted = {"type": "json_schema", "json_schema": schema}
    await chat(served, response_format=wanted, extra_body={"max_thinking_tokens": 7})
    [request] = served.core.submitted
    assert request.grammar is not None
    assert request.thinking is not None
    assert 'start:  thought? "<|channel|>final<|message|>" %json' in request.grammar.source
    assert (request.thinking.max_tokens, request.thinking.reopens) == (7, True)
    with pytest.raises(openai.BadRequestError, match="gpt-oss"):
        await chat(served, extra_body={"regex": "a+"})


async def test_strict_tools_become_a_grammar_with_any_choice(serve: Serve) -> None:
    served = await serve(text="Hello.", tool_call_parser="llama3")
    strict = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    [choice] = (await chat(served, tools=[strict])).choices
    assert choice.message.content == "Hello."
    grammar = served.core.submitted[0].grammar
    assert grammar is not None
    assert "FREE" in grammar.source


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools.0.type"),
        ({"tools": [*TOOLS, {"type": "function", "function": {"name": "a b"}}]}, "tools.2.function.name"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools.2.function.name"),
        ({"tools": [{"function": {"name": "f", "parameters": []}}]}, "tools.0.function.parameters"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools.0.function.parameters.type",
        ),
        ({"tools": [{"function": {"name": "f", "strict": "yes"}}]}, "tools.0.function.strict"),
        ({"tools": [{"function": {"name": f"f{n}"}} for n in range(600)]}, "tools"),
        ({"tools": [{"function": {"name": "f", "description": "x" * 300_000}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function.name"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "any"}}},
            "tool_choice.allowed_tools.mode",
        ),
    ],
)
async def test_wrong_tools_are_named(served: Served, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await chat(served, **options)
    assert caught.value.param == param
    assert not served.core.submitted


async def test_unknown_format_is_refused_with_the_option_to_set(serve: Serve) -> None:
    served = await serve()
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser") as caught:
        await chat(served, tools=TOOLS)
    assert caught.value.param == "tools"


async def test_marks_that_are_special_tokens_are_read_and_others_not_shown(serve: Serve, tmp_path: Path) -> None:
    tiny_tokenizers.write(tmp_path, "byte_bpe")
    marks = ("<tool_call>", "</tool_call>", "<|other|>")
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    first = 1 + max(token["id"] for token in content["added_tokens"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for number, mark in enumerate(marks):
        content["added_tokens"].append({"id": first + number, "content": mark, "special": True, **flags})
    path.write_text(json.dumps(content), encoding="utf-8")
    plan = TokenizerPlan(
        tokenizer_path=str(tmp_path),
        mode="auto",
        trust_remote_code=False,
        revision=None,
        chat_template=None,
    )
    facts = fake_core.make_facts(vocab_size=1024)
    tokenizer = Tokenizer.load(plan, facts)
    call = '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'
    core = fake_core.FakeCore(tokenizer, text=f"One<|other|> two.{call}", facts=facts, tool_call_parser="qwen25")
    assert set(tokenizer.ids_of(marks).values()) <= tokenizer.special_ids
    served = await serve(core)
    [choice] = (await chat(served, tools=TOOLS)).choices
    assert choice.message.content == "One two."
    assert [called.function.name for called in choice.message.tool_calls] == ["stop"]
    [plain] = (await chat(served)).choices
    assert plain.message.content == 'One two.{"name": "stop", "arguments": {}}'


async def test_calls_of_a_text_can_be_asked_for(served: Served) -> None:
    answer = await served.post("/parse_function_call", text=TEXTS["kimi_k2"], tools=TOOLS, tool_call_parser="kimi_k2")
    assert answer["normal_text"] == "Hi there."
    assert [(call["name"], json.loads(call["parameters"])) for call in answer["calls"]] == CALLS
    assert [call["tool_index"] for call in answer["calls"]] == [0, 1]
    harmony = await served.post("/parse_function_call", text=TEXTS["gpt-oss"], tool_call_parser="gpt-oss", tools=TOOLS)
    assert len(harmony["calls"]) == 2
    own = await served.post("/parse_function_call", text=TEXTS["qwen25"], tools=TOOLS)
    assert len(own["calls"]) == 2


async def test_reasoning_of_a_text_can_be_asked_for(served: Served) -> None:
    for name, text in (
        ("deepseek-r1", "Hm.\n</think>\n\nYes."),
        ("qwen3", "<think>Hm.</think>Yes."),
        ("qwen3", "Hm.</think>Yes."),
        ("kimi", "◁think▷Hm.◁/think▷Yes."),
        (None, THOUGHT.replace("Is it?", "Hm.") + "Yes."),
    ):
        answer = await served.post("/separate_reasoning", text=text, reasoning_parser=name)
        assert answer == {"reasoning_text": "Hm.", "text": "Yes."}


@pytest.mark.parametrize(
    ("path", "name"),
    [("/parse_function_call", "tool_call_parser"), ("/separate_reasoning", "reasoning_parser")],
)
async def test_unknown_parser_is_named(serve: Serve, path: str, name: str) -> None:
    served = await serve()
    for body in ({"text": "x", name: "other"}, {"text": "x"}):
        response = await served.http.post(path, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == name
