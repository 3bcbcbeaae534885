"""/v1/chat/completions with the official client."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
import openai
import orjson
import pytest

import fake_core
from runtime.tokenizer.chat_template import ChatTemplate
from serve.calls import body as call_body
from serve.calls.chat_completions.messages import chat_of
from serve.calls.chat_completions.schema import ChatBody
from serve.calls.decode import decode
from serve.openai import chat as handlers
from serve.openai.responses.call import _template_kwargs as kwargs_of_response
from serve.openai.responses.schema import ResponsesBody
from served_core import Serve, Served

Fields = dict[str, Any]
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
LONG = 200


async def chat(served: Served, **options: Any) -> Any:
    given = {"model": fake_core.MODEL, "messages": HELLO, "max_tokens": LONG, **options}
    return await served.openai.chat.completions.create(**given)


async def chunks(served: Served, **options: Any) -> list[Any]:
    return [chunk async for chunk in await chat(served, stream=True, **options)]


def called(arguments: str) -> dict[str, Any]:
    """Return an assistant message with a tool call."""
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


async def test_message_is_answered(served: Served) -> None:
    answer = await chat(served)
    [choice] = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == fake_core.TEXT
    assert (choice.finish_reason, choice.matched_stop) == ("stop", 0)
    assert answer.object == "chat.completion"
    assert answer.metadata == {"weight_version": "default"}
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


@pytest.mark.parametrize("fields", [{"logprobs": True}, {"prompt_logprobs": 1}])
async def test_long_lists_are_written_in_a_thread(
    served: Served, monkeypatch: pytest.MonkeyPatch, fields: Fields
) -> None:
    threads: list[threading.Thread] = []

    def answer(*values: Any) -> Any:
        threads.append(threading.current_thread())
        return written(*values)

    written = handlers.chat_answer
    monkeypatch.setattr(handlers, "chat_answer", answer)
    await chat(served, extra_body=fields)
    assert threads
    assert threading.main_thread() not in threads


async def test_answer_id_is_the_callers_rid(served: Served) -> None:
    assert (await chat(served, extra_body={"rid": "mine"})).id == "mine"


async def test_template_makes_the_prompt(served: Served) -> None:
    await chat(served)
    [request] = served.core.submitted
    assert request.text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    assert request.add_special_tokens is False


async def test_final_message_can_be_continued(served: Served) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "It is"}]
    await chat(served, messages=messages, extra_body={"continue_final_message": True})
    assert (served.core.submitted[0].text or "").endswith("<|im_start|>assistant\nIt is")


async def test_developer_and_text_parts_are_understood(served: Served) -> None:
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
    await chat(served, messages=[{"role": "developer", "content": parts}, *HELLO])
    assert (served.core.submitted[0].text or "").startswith("<|im_start|>system\nBe brief.<|im_end|>")


async def test_earlier_tool_calls_reach_the_template(served: Served) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    await chat(served, messages=messages)
    assert '{"name": "add", "arguments": {"a": 1}}' in (served.core.submitted[0].text or "")


async def test_max_tokens_left_out_means_until_the_context_ends(served: Served) -> None:
    await served.post("/v1/chat/completions", messages=HELLO)
    await served.post("/v1/chat/completions", messages=HELLO, max_tokens=None)
    await served.post("/v1/chat/completions", messages=HELLO, max_completion_tokens=3)
    assert [r.sampling.max_new_tokens for r in served.core.submitted] == [None, None, 3]


async def test_temperature_comes_from_the_request_then_the_user_then_the_model(serve: Serve) -> None:
    facts = fake_core.make_facts(preferred_sampling={"temperature": 0.3, "top_k": 0, "top_p": 0.8})
    plain, modelled = await serve(), await serve(facts=facts)
    preferred = await serve(facts=facts, preferred_sampling={"temperature": 0.4})
    openai = await serve(facts=facts, model_sampling=False)
    every = (plain, modelled, preferred, openai)
    for served in every:
        await chat(served)
        await chat(served, temperature=0.1)
    found = [[r.sampling.temperature for r in s.core.submitted] for s in every]
    assert found == [[0.7, 0.1], [0.3, 0.1], [0.4, 0.1], [0.7, 0.1]]
    assert openai.core.submitted[0].sampling == plain.core.submitted[0].sampling
    assert (modelled.core.submitted[0].sampling.top_k, modelled.core.submitted[0].sampling.top_p) == (-1, 0.8)


async def test_stream_put_together_is_the_whole_answer(served: Served) -> None:
    deltas = [chunk.choices[0].delta for chunk in await chunks(served)]
    assert deltas[0].role == "assistant"
    assert deltas[0].content == ""
    assert all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == fake_core.TEXT


async def test_choices_finish_after_the_last_content(served: Served) -> None:
    found = [chunk.choices[0] for chunk in await chunks(served, n=2)]
    for index in (0, 1):
        own = [choice for choice in found if choice.index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == fake_core.TEXT
    assert [choice.finish_reason for choice in found[-2:]] == ["stop", "stop"]
    assert [choice.index for choice in found[-2:]] == [0, 1]
    assert all(choice.finish_reason is None for choice in found[:-2])


async def test_every_chunk_has_the_same_head_and_all_fields(served: Served) -> None:
    events = await served.events("/v1/chat/completions", messages=HELLO, max_tokens=4)
    heads = {(e["id"], e["object"], e["created"], e["model"]) for e in events}
    assert len(heads) == 1
    for event in events:
        assert event["usage"] is None
        [choice] = event["choices"]
        assert set(choice) == {"index", "delta", "logprobs", "finish_reason", "matched_stop"}
        assert set(choice["delta"]) == {"role", "content", "reasoning_content", "tool_calls"}


async def test_usage_counts_the_prompt_once_and_all_output(serve: Serve) -> None:
    served = await serve(cache_report=True)
    served.core.num_cached = 16
    one, two = await chat(served, max_tokens=5), await chat(served, max_tokens=5, n=2)
    assert two.usage.prompt_tokens == one.usage.prompt_tokens
    assert (one.usage.completion_tokens, two.usage.completion_tokens) == (5, 10)
    assert two.usage.prompt_tokens_details.cached_tokens == 16


async def test_cached_tokens_are_told_only_when_the_server_is_set_so(served: Served) -> None:
    served.core.num_cached = 16
    assert (await chat(served)).usage.prompt_tokens_details is None


async def test_usage_of_a_stream_comes_last_when_asked_for(served: Served) -> None:
    found = await chunks(served, max_tokens=5, stream_options={"include_usage": True})
    assert [chunk.usage is not None for chunk in found] == [False] * (len(found) - 1) + [True]
    assert found[-1].choices == []
    assert found[-1].usage.completion_tokens == 5


async def test_usage_can_come_with_every_chunk(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = await chunks(served, max_tokens=3, stream_options=options)
    counts = [chunk.usage.completion_tokens for chunk in found if chunk.usage]
    assert counts == sorted(counts)
    assert counts[:2] == [0, 1]  # the role is not a token
    assert counts[-1] == 3


async def test_logprobs_tell_tokens_and_bytes(served: Served) -> None:
    answer = await chat(served, max_tokens=3, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert "".join(token.token for token in content) == answer.choices[0].message.content
    assert [token.logprob for token in content] == [-0.25, -0.5, -0.75]
    assert bytes(content[0].bytes) == b"On"
    assert [top.logprob for top in content[0].top_logprobs] == [-0.25, -1.25]


async def test_streamed_logprobs_are_those_of_the_whole_answer(served: Served) -> None:
    whole = await chat(served, logprobs=True, top_logprobs=1)
    found = await chunks(served, logprobs=True, top_logprobs=1)
    streamed = [t for c in found if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert streamed == whole.choices[0].logprobs.content


async def test_minus_infinity_is_a_number_in_json(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fake_core.logprobs_of

    def impossible(*args: Any, **kwargs: Any) -> Any:
        found = real(*args, **kwargs)
        return found._replace(chosen=[(float("-inf"), token) for _, token in found.chosen])

    monkeypatch.setattr(fake_core, "logprobs_of", impossible)
    answer = await chat(served, max_tokens=1, logprobs=True)
    assert answer.choices[0].logprobs.content[0].logprob == -9999.0


async def test_sync_client_is_served(served: Served) -> None:
    def ask() -> str:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
            stream = client.chat.completions.create(model=fake_core.MODEL, messages=HELLO, stream=True, max_tokens=LONG)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(ask) == fake_core.TEXT


async def test_model_is_known_by_name_and_path(served: Served) -> None:
    for model in (fake_core.MODEL, "org/tiny", "/models/tiny", "default"):
        assert (await chat(served, model=model)).model == model
    with pytest.raises(openai.NotFoundError) as caught:
        await chat(served, model="other")
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"n": 1000}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [*HELLO, {"role": "system", "content": "x"}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"extra_body": {"min_tokens": 9, "max_tokens": 3}}, "min_tokens"),
        ({"extra_body": {"regex": 1}}, "regex"),
        ({"extra_body": {"lora_path": 5}}, "lora_path"),
        ({"extra_body": {"chat_template_kwargs": {"messages": 1}}}, "chat_template_kwargs.messages"),
        ({"extra_body": {"continue_final_message": True}}, "continue_final_message"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "x"}}]}]},
            "messages.0.content.0.input_audio.data",
        ),
        ({"messages": [{"role": "user", "content": "long " * 600}]}, "messages"),
        ({"messages": [called('{"a":' * 9000)]}, "messages.0.tool_calls.0.function.arguments"),
        ({"messages": [called("[" * 99_000)]}, "messages.0.tool_calls.0.function.arguments"),
        ({"extra_body": {"input_ids": [1]}}, "input_ids"),
        ({"extra_body": {"prompt_logprobs": -1}}, "prompt_logprobs"),
        ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
        ({"extra_body": {"echo": True}}, "echo"),
        ({"extra_body": {"chat_template": "{{ messages }}"}}, "chat_template"),
        ({"extra_body": {"truncate_prompt_tokens": 0}}, "truncate_prompt_tokens"),
        ({"extra_body": {"allowed_token_ids": []}}, "allowed_token_ids"),
        ({"extra_body": {"bad_words": [""]}}, "bad_words"),
    ],
)
async def test_wrong_parameter_is_named(served: Served, options: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await chat(served, **options)
    assert caught.value.param == param
    body: Any = caught.value.body
    assert (body["object"], body["code"], body["type"]) == ("error", 400, "BadRequestError")


async def test_tools_that_may_not_be_used_are_no_trouble(served: Served) -> None:
    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    await chat(served, tools=tools, tool_choice="none", user="me", seed=5)
    assert served.core.submitted[0].sampling.seed == 5


async def test_reasoning_options_reach_the_template(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def render(messages: Any, check: Any, **kwargs: Any) -> str:
        seen.update(kwargs)
        return "prompt"

    monkeypatch.setattr(served.core.tokenizer.template, "render", render)
    extra = {"chat_template_kwargs": {"style": "short"}, "reasoning": {"enabled": True, "effort": "low"}}
    await chat(served, extra_body=extra)
    assert seen == {
        "add_generation_prompt": True,
        "continue_final_message": False,
        "style": "short",
        "thinking": True,
        "enable_thinking": True,
        "reasoning_effort": "low",
    }


async def test_text_is_escaped_as_json_wants_it(serve: Serve) -> None:
    text = 'He said: "1 + 1\n\t= 2" \\ and </script> \u2028 🚀'
    served = await serve(text=text)
    events = await served.events("/v1/chat/completions", messages=HELLO, max_tokens=LONG)
    assert "".join(e["choices"][0]["delta"]["content"] or "" for e in events) == text
    raw = orjson.dumps(events)
    assert orjson.loads(raw) == events


async def test_hostile_chat_holds_nobody_up(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client provides the data of a template's loops. Such a request is refused by its cost, in a thread, while
    others are answered.
    """
    source = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    monkeypatch.setattr(served.core.tokenizer, "template", ChatTemplate({"default": source}, {}))
    hostile = asyncio.create_task(chat(served, extra_body={"chat_template_kwargs": {"n": 50_000}}))
    answered = 0
    while not hostile.done():
        await chat(served, extra_body={"chat_template_kwargs": {"n": 2}})
        answered += 1
    with pytest.raises(openai.BadRequestError, match="would take more than 1 s or 64 MiB"):
        await hostile
    assert answered > 1


async def test_template_may_be_told_not_to_open_the_answer(served: Served) -> None:
    await chat(served, extra_body={"add_generation_prompt": False, "truncate_prompt_tokens": -1})
    [request] = served.core.submitted
    assert request.text == "<|im_start|>user\nHello<|im_end|>\n"
    assert request.keep_last == -1


@pytest.fixture
def _nothing_logged_yet() -> None:
    call_body._log_unknown.cache_clear()


@pytest.mark.usefixtures("_nothing_logged_yet")
async def test_unknown_field_is_logged_once(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        await chat(served, max_tokens=1, store=True, extra_body={"temprature": 1})
    [line] = [record.getMessage() for record in caplog.records if record.name == "penstock.http"]
    assert "'temprature'" in line
    for number in range(3):
        unknown = {f"x{number}_{each}": 1 for each in range(call_body.MAX_LOGGED // 2)}
        await chat(served, max_tokens=1, extra_body=unknown)
    assert len([record for record in caplog.records if record.name == "penstock.http"]) == call_body.MAX_LOGGED


TOOL: Fields = {"type": "function", "function": {"name": "f", "parameters": {}}}
UNKNOWN: Mapping[str, Fields] = {  # unknown fields by path, in an otherwise valid body
    "messages.1.contnet": {"messages": [HELLO[0], {"role": "user", "content": "Hi", "contnet": "a"}]},
    "messages.0.content.0.txt": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi", "txt": "a"}]}]
    },
    "stream_options.include_usages": {"stream": True, "stream_options": {"include_usages": True}},
    "tools.0.functon": {"tools": [{**TOOL, "functon": {}}], "tool_choice": "none"},
    "tools.0.function.paramters": {
        "tools": [{**TOOL, "function": {"name": "f", "paramters": {}}}],
        "tool_choice": "none",
    },
    "response_format.json_shema": {"response_format": {"type": "text", "json_shema": {}}},
    "response_format.json_schema.scheme": {
        "response_format": {"type": "json_schema", "json_schema": {"schema": {}, "scheme": {}}}
    },
}
KNOWN: Fields = {  # fields of answers that clients send back and that have no effect
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": "Yes?", "refusal": None, "annotations": [], "audio": None},
        *HELLO,
    ],
    "tools": [TOOL],
    "tool_choice": "none",
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}, "strict": True}},
}


@pytest.mark.usefixtures("_nothing_logged_yet")
async def test_unknown_fields_below_the_body_are_told(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    open_one, strict = await serve(), await serve(refuse_unknown_fields=True)

    async def ask(served: Served, fields: Fields) -> httpx.Response:
        return await served.http.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 1, **fields})

    for path, fields in UNKNOWN.items():
        for _ in range(2):
            assert (await ask(open_one, fields)).status_code == 200, path
        refused = await ask(strict, fields)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, path)
        assert "did you mean" in refused.json()["error"]["message"]
    told = [record.getMessage() for record in caplog.records if record.name == "penstock.http"]
    assert [line.rpartition(": ")[2] for line in told] == [repr(re.sub(r"\.\d+", "", path)) for path in UNKNOWN]
    for served in (open_one, strict):
        assert (await ask(served, KNOWN)).status_code == 200
    assert len(told) == len([r for r in caplog.records if r.name == "penstock.http"])


BLOCK: Fields = {"type": "text", "text": "Hi"}
CALL: Fields = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
NOT_CALLED: Fields = {"type": "none"}
OTHER_APIS: Sequence[tuple[str, Fields, Sequence[str]]] = (  # (route, fields, the ends of the reported paths)
    (
        "/v1/messages",
        {"messages": [{"role": "user", "content": [{**BLOCK, "txt": 1}]}]},
        ["messages.0.content.0.txt"],
    ),
    ("/v1/messages", {"messages": HELLO, "system": [{**BLOCK, "txt": 1}]}, ["system.0.txt"]),
    ("/v1/messages", {"messages": [{**HELLO[0], "rle": 1}]}, ["messages.0.rle"]),
    (
        "/v1/messages",
        {
            "messages": HELLO,
            "tool_choice": NOT_CALLED,
            "tools": [{"name": "f", "input_schema": {}, "strct": True}],
        },
        ["tools.0.strct"],
    ),
    ("/v1/messages/count_tokens", {"messages": [{**HELLO[0], "role_": 1}]}, ["messages.0.role_"]),
    ("/api/chat", {"messages": [{**HELLO[0], "contnet": 1}]}, ["messages.0.contnet"]),
    (
        "/api/chat",
        {"messages": HELLO, "options": {"new_top_k": 1}, "keep_allive": 1},
        ["keep_allive", "options.new_top_k"],
    ),
    ("/api/generate", {"prompt": "Hi", "sytem": "a"}, ["sytem"]),
    ("/v1/responses", {"input": [{**HELLO[0], "cntent": 1}]}, ["input.0.cntent"]),
    (
        "/v1/responses",
        {"input": [HELLO[0], {"role": "user", "content": [{"type": "input_text", "text": "Hi", "tet": 1}]}]},
        ["input.1.content.0.tet"],
    ),
    ("/v1/responses", {"input": [*HELLO, {**CALL, "namespac": 1}]}, ["input.1.namespac"]),
    ("/v1/responses", {"input": "Hi", "reasoning": {"effrt": "low"}}, ["reasoning.effrt"]),
    (
        "/v1/responses",
        {
            "input": "Hi",
            "tool_choice": "none",
            "tools": [{"type": "function", "name": "f", "parametrs": {"a": 1}}],
        },
        ["tools.0.parametrs"],
    ),
    ("/v1/responses/input_tokens", {"input": [{**HELLO[0], "contents": 1}]}, ["input.0.contents"]),
    (
        "/v1/messages",  # fields of answers, and cache hints
        {
            "messages": [
                {"role": "user", "content": [{**BLOCK, "cache_control": {"type": "ephemeral"}}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "Hm", "signature": "abc"},
                        {**BLOCK, "citations": [{"type": "char_location"}]},
                        {
                            "type": "tool_use",
                            "id": "a",
                            "name": "f",
                            "input": {},
                            "caller": {"type": "direct"},
                        },
                    ],
                },
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": [BLOCK]}],
                },
            ],
            "tools": [{"name": "f", "input_schema": {}, "eager_input_streaming": True}],
            "tool_choice": NOT_CALLED,
        },
        [],
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm"}]},
                {
                    "type": "message",
                    "role": "assistant",
                    "id": "msg_1",
                    "status": "completed",
                    "phase": "final_answer",
                    "content": [{"type": "output_text", "text": "Hi", "annotations": [{}], "logprobs": [{}]}],
                },
                {**CALL, "id": "fc_1", "status": "completed"},
                {"type": "function_call_output", "call_id": "a", "output": "1", "id": "fo_1"},
                HELLO[0],
            ]
        },
        [],
    ),
)


@pytest.mark.usefixtures("_nothing_logged_yet")
async def test_unknown_fields_in_the_bodies_of_other_apis_are_told(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    open_one, strict = await serve(), await serve(refuse_unknown_fields=True)
    needed = {
        "/v1/messages": {"max_tokens": 1},
        "/api/chat": {"stream": False},
        "/api/generate": {"stream": False},
    }
    for route, fields, paths in OTHER_APIS:
        body = {"model": fake_core.MODEL, **needed.get(route, {}), **fields}
        caplog.clear()
        answer = await open_one.http.post(route, json=body)
        assert answer.status_code == 200, answer.text
        told = [record.getMessage() for record in caplog.records if record.name == "penstock.http"]
        assert sorted(line.rpartition(": ")[2] for line in told) == [repr(re.sub(r"\.\d+", "", path)) for path in paths]
        refused = await strict.http.post(route, json=body)
        assert refused.status_code == (400 if paths else 200), refused.text
        if paths:
            words = [f"{path} is not a field of this route; did you mean" for path in paths]
            assert any(each in refused.text for each in words), refused.text


def test_any_effort_switches_thinking_and_what_says_so_wins() -> None:
    cases: list[tuple[Fields, bool]] = [
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning": {"effort": "high"}}, True),
        ({"reasoning_effort": "low", "enable_thinking": False}, False),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, True),
    ]
    for fields, thinks in cases:
        asked = chat_of(decode(ChatBody, {"messages": HELLO, **fields}))
        assert asked.template_kwargs["enable_thinking"] is thinks, fields
    for effort in ("low", "none"):
        response = decode(ResponsesBody, {"reasoning": {"effort": effort}})
        asked = chat_of(decode(ChatBody, {"messages": HELLO, "reasoning_effort": effort}))
        assert asked.template_kwargs == kwargs_of_response(response)


async def test_a_schema_beside_json_object_is_enforced(served: Served) -> None:
    await chat(served, extra_body={"response_format": {"type": "json_object", "schema": {"type": "object"}}})
    [request] = served.core.submitted
    assert request.grammar is not None
    assert (request.grammar.kind, request.grammar.source) == ("json_schema", '{"type":"object"}')


async def test_unknown_field_is_refused_on_demand(serve: Serve) -> None:
    served = await serve(refuse_unknown_fields=True)
    await chat(served, max_tokens=1, store=True, seed=1, logit_bias={"5": 1}, extra_body={"top_k": 3})
    with pytest.raises(openai.BadRequestError, match="did you mean temperature") as caught:
        await chat(served, extra_body={"temprature": 1})
    assert caught.value.param == "temprature"
    for path, body in {"/generate": {"text": "a"}, "/tokenize": {"prompt": "a"}}.items():
        assert (await served.http.post(path, json=body)).status_code == 200
        refused = await served.http.post(path, json={**body, "strean": True})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "strean")


async def test_another_models_name_is_answered_on_demand(serve: Serve) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await chat(await serve(), model="gpt-4o")
    assert (await chat(await serve(ignore_model_name=True), model="gpt-4o")).model == "gpt-4o"


async def test_messages_without_content_or_with_a_refusal_are_accepted(served: Served) -> None:
    for message in (
        {"content": [{"type": "text", "text": "No"}, {"type": "refusal", "refusal": "!"}]},
        {"content": None, "refusal": "No!"},
        {"content": None, "tool_calls": []},
    ):
        messages = [*HELLO, {"role": "assistant", **message}, *HELLO]
        answer = await served.http.post("/v1/chat/completions", json={"messages": messages})
        assert answer.status_code == 200, answer.text
    assert [("No!" in (request.text or "")) for request in served.core.submitted] == [True, True, False]


async def test_every_event_has_its_usage_the_last_of_a_choice_too(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = await served.events("/v1/chat/completions", messages=HELLO, stream_options=options)
    [last] = [event for event in events if event["choices"] and event["choices"][0]["finish_reason"]]
    assert last["usage"] == events[-1]["usage"]
    assert last["usage"]["completion_tokens"] > 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"reasoning_effort": "bogus"}, 'reasoning_effort must be "none" or'),
        ({"reasoning": {"effort": "bogus"}}, "reasoning.effort must be"),
        ({"functions": [{"name": "f"}], "tools": []}, "functions and tools exclude each other"),
        ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "there is no function called 'g'"),
        ({"functions": [{"name": "f"}], "function_call": "must"}, 'function_call must be "none", "auto"'),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "Send a custom tool as a function"),
    ],
)
async def test_refusals_say_what_to_do(served: Served, body: dict[str, Any], message: str) -> None:
    answer = await served.http.post("/v1/chat/completions", json={"messages": HELLO, **body})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
