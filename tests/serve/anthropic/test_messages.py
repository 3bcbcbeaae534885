"""/v1/messages with Anthropic's client. Every streamed event is checked against the client's types."""

from __future__ import annotations

from typing import Any

import anthropic
import orjson
import pytest
from anthropic.types import RawMessageStreamEvent
from pydantic import TypeAdapter

import fake_core
from runtime.errors import Overloaded
from served_core import Serve, Served

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
BODY: dict[str, Any] = {"model": fake_core.MODEL, "messages": HELLO, "max_tokens": 200}
EVENT = TypeAdapter(RawMessageStreamEvent)


def client_of(served: Served) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=served.url, api_key="none", max_retries=0)


async def create(served: Served, **options: Any) -> Any:
    async with client_of(served) as client:
        given = {**BODY, **options}
        extra = {name: given.pop(name) for name in ("temperature", "top_k", "top_p") if name in given}
        return await client.messages.create(**given, extra_body=extra)


async def events(served: Served, **options: Any) -> list[dict[str, Any]]:
    """Return the events of a stream as JSON. Each event must be named like its type, and valid for the client."""
    response = await served.http.post("/v1/messages", json={**BODY, "stream": True, **options})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for frame in response.text.removesuffix("\n\n").split("\n\n"):
        name, _, data = frame.partition("\n")
        event = orjson.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] not in ("ping", "error"):
            EVENT.validate_python(event)
        found.append(event)
    return found


async def test_message_is_answered(served: Served) -> None:
    served.core.num_cached = 3
    answer = await create(served)
    [block] = answer.content
    assert (block.type, block.text) == ("text", fake_core.TEXT)
    assert (answer.role, answer.type, answer.stop_reason, answer.stop_sequence) == (
        "assistant",
        "message",
        "end_turn",
        None,
    )
    usage = answer.usage
    [request] = served.core.submitted
    assert usage.cache_read_input_tokens == 3
    assert usage.input_tokens + 3 == len(served.core.tokenizer.encode_batch([request.text])[0])
    assert usage.output_tokens > 10
    assert answer.id.startswith("msg_")


async def test_documents_of_text_stand_in_the_prompt(served: Served) -> None:
    source = {"type": "text", "media_type": "text/plain", "data": "Frogs are green."}
    document = {"type": "document", "title": "Frogs", "context": "A note.", "source": source}
    turn = {"role": "user", "content": [document, {"type": "text", "text": "Which colour?"}]}
    await create(served, messages=[turn])
    [request] = served.core.submitted
    assert "Frogs\n\nA note.\n\nFrogs are green.\n\nWhich colour?" in (request.text or "")
    for wrong in ({"citations": {"enabled": True}}, {"source": {"type": "url", "url": "http://127.0.0.1"}}):
        with pytest.raises(anthropic.BadRequestError):
            await create(served, messages=[{"role": "user", "content": [{**document, **wrong}]}])


async def test_context_management_that_clears_nothing_is_accepted(served: Served) -> None:
    keep = {"type": "clear_thinking_20251015", "keep": "all"}
    body = {**BODY, "context_management": {"edits": [keep]}}
    assert (await served.http.post("/v1/messages", json=body)).status_code == 200
    for edit in (
        {"type": "clear_tool_uses_20250919"},
        {**keep, "keep": {"type": "thinking_turns", "value": 1}},
    ):
        body = {**BODY, "context_management": {"edits": [edit]}}
        refused = await served.http.post("/v1/messages", json=body)
        assert (refused.status_code, "context_management.edits.0" in refused.text) == (400, True)


async def test_events_come_in_the_documented_order(served: Served) -> None:
    found = await events(served)
    kinds = [event["type"] for event in found]
    num_deltas = kinds.count("content_block_delta")
    assert num_deltas > 3
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * num_deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(e["delta"]["text"] for e in found[2:-3]) == fake_core.TEXT
    assert found[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


async def test_clients_own_accumulator_makes_the_whole_answer(served: Served) -> None:
    whole = await create(served)
    async with (
        client_of(served) as client,
        client.messages.stream(model=fake_core.MODEL, messages=HELLO, max_tokens=200) as stream,
    ):
        texts = [text async for text in stream.text_stream]
        final: Any = await stream.get_final_message()
    assert "".join(texts) == fake_core.TEXT
    assert final.content[0].text == whole.content[0].text
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", whole.usage.output_tokens)


async def test_stop_reasons(served: Served) -> None:
    cut = await create(served, max_tokens=3)
    stopped = await create(served, stop_sequences=["engine", "never"])
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "engine")
    streamed = await events(served, stop_sequences=["engine"])
    assert streamed[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "engine"}


async def test_system_and_blocks_make_the_prompt(served: Served) -> None:
    cached = {"type": "ephemeral"}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "One", "cache_control": cached}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Two"}]},
        {"role": "user", "content": "Three"},
    ]
    await create(served, messages=messages, system="Be brief.")
    await create(served, messages=messages, system=[{"type": "text", "text": "Be brief."}])
    first, second = (request.text for request in served.core.submitted)
    assert first == second
    assert first is not None
    assert first.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne<|im_end|>")
    assert first.endswith("Three<|im_end|>\n<|im_start|>assistant\n")


async def test_last_message_of_the_assistant_is_continued(served: Served) -> None:
    await create(served, messages=[*HELLO, {"role": "assistant", "content": "It is"}])
    assert (served.core.submitted[0].text or "").endswith("<|im_start|>assistant\nIt is")


async def test_calls_and_results_of_earlier_turns_reach_the_template(served: Served) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "2"}]}
    failed = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no", "is_error": True}
    asked = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "Adding."}, use]},
        {"role": "user", "content": [result, failed, {"type": "text", "text": "Go on"}]},
    ]
    await create(served, messages=asked)
    prompt = served.core.submitted[0].text or ""
    assert '{"name": "add", "arguments": {"a": 1}}' in prompt
    assert '{"error":"no"}' in prompt
    assert prompt.index("Adding.") < prompt.index('"a": 1') < prompt.index("Go on")


async def test_thinking_is_off_unless_asked_for(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def render(messages: Any, check: Any, **kwargs: Any) -> str:
        seen.append((kwargs["enable_thinking"], kwargs["thinking"]))
        return "prompt"

    monkeypatch.setattr(served.core.tokenizer.template, "render", render)
    for thinking in (None, {"type": "disabled"}, {"type": "adaptive"}):
        await create(served, **({"thinking": thinking} if thinking else {}))
    assert seen == [(False, False), (False, False), (True, True)]


async def test_tokens_are_counted_without_generating(served: Served) -> None:
    async with client_of(served) as client:
        counted = await client.messages.count_tokens(model=fake_core.MODEL, messages=HELLO, system="Be brief.")
    answer = await create(served, system="Be brief.")
    assert counted.input_tokens == answer.usage.input_tokens
    assert len(served.core.submitted) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role must be"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages.0.content.0.type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages.0.content.0.text is required",
        ),
        ({"temperature": -1}, "temperature must be"),
        ({"stop_sequences": ["x"] * 100}, "At most 64 stops"),
        ({"stop_sequences": [""]}, "stop string"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is required"),
        ({"thinking": {"type": "enabled", "budget_tokens": 200}}, "thinking.budget_tokens must be less"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0.type"),
        ({"tools": [{"name": "f"}]}, "tools.0.input_schema is required"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name is required"),
        ({"messages": [{"role": "user", "content": "long " * 600}]}, "too long"),
        ({"max_token": 3}, "max_token is not known; did you mean max_tokens?"),
        ({"container": "x"}, "container is not supported yet"),
    ],
)
async def test_mistakes_are_told_in_this_apis_words(served: Served, options: dict[str, Any], words: str) -> None:
    async with client_of(served) as client:
        with pytest.raises(anthropic.BadRequestError) as caught:
            await client.post("/v1/messages", body={**BODY, **options}, cast_to=object)
    told: Any = caught.value.body
    assert told["type"] == "error"
    assert told["error"]["type"] == "invalid_request_error"
    assert words in told["error"]["message"]


async def test_unknown_model_and_overload(served: Served) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await create(served, model="claude")
    served.core.refusal = Overloaded("The queue is full.")
    with pytest.raises(anthropic.InternalServerError) as caught:
        await create(served)
    body: Any = caught.value.body
    assert (caught.value.status_code, body["error"]["type"]) == (503, "overloaded_error")


async def test_failure_in_a_stream_is_its_last_event(serve: Serve) -> None:
    served = await serve(held=True)
    first, *_, name, data, _ = await served.lines_after(served.fail, "/v1/messages", **BODY)
    assert (first, name) == ("event: message_start", "event: error")
    told = orjson.loads(data.removeprefix("data: "))
    assert told["error"] == {"type": "api_error", "message": "A step failed."}


async def test_aborted_request_is_an_error(serve: Serve) -> None:
    served = await serve(held=True)
    *_, name, data, _ = await served.lines_after(served.core.abort_all, "/v1/messages", **BODY)
    assert name == "event: error"
    assert orjson.loads(data.removeprefix("data: "))["error"]["message"] == "The request was aborted."


async def test_key_may_come_in_this_apis_header(serve: Serve) -> None:
    served = await serve(api_key="open-sesame")
    for key, is_right in (("open-sesame", True), ("wrong", False)):
        async with anthropic.AsyncAnthropic(base_url=served.url, api_key=key, max_retries=0) as client:
            if is_right:
                answer: Any = await client.messages.create(**BODY)
                assert answer.content[0].text == fake_core.TEXT
                continue
            with pytest.raises(anthropic.AuthenticationError) as caught:
                await client.messages.create(**BODY)
            body: Any = caught.value.body
            assert body["error"] == {"type": "authentication_error", "message": "Unauthorized"}
