"""/v1/responses with the official client. Every streamed event is checked against the client's types."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import orjson
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

import fake_core
from served_core import Serve, Served

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
BODY: dict[str, Any] = {"model": fake_core.MODEL, "input": "Hello"}


async def create(served: Served, **options: Any) -> Any:
    extra = {name: options.pop(name) for name in ("seed", "top_k") if name in options}
    return await served.openai.responses.create(**{**BODY, **options}, extra_body=extra)


async def events(served: Served, **options: Any) -> list[dict[str, Any]]:
    """Return the events of a stream as JSON. Each event must be named like its type, numbered, and valid for the
    client.
    """
    response = await served.http.post("/v1/responses", json={**BODY, "stream": True, **options})
    assert response.status_code == 200, response.text
    return checked(response.text.removesuffix("\n\n").split("\n\n"))


def checked(frames: list[str]) -> list[dict[str, Any]]:
    found = []
    for number, frame in enumerate(frames):
        name, _, data = frame.partition("\n")
        event = orjson.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        EVENT.validate_python(event, strict=True)
        found.append(event)
    return found


async def test_input_is_answered(served: Served) -> None:
    served.core.num_cached = 3
    answer = await create(served, instructions="Be brief.", max_output_tokens=200, metadata={"a": "b"})
    Response.model_validate(answer.model_dump(), strict=True)
    assert answer.output_text == fake_core.TEXT
    assert (answer.status, answer.object, answer.metadata) == ("completed", "response", {"a": "b"})
    assert (answer.instructions, answer.max_output_tokens) == ("Be brief.", 200)
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    [request] = served.core.submitted
    assert (request.text or "").startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello")
    assert request.sampling.max_new_tokens == 200
    assert answer.temperature == request.sampling.temperature


async def test_tokens_are_counted_without_generating(served: Served) -> None:
    first = await create(served)
    asked: dict[str, Any] = {"model": fake_core.MODEL, "instructions": "Be brief.", "input": "Hello again"}
    counted = await served.openai.responses.input_tokens.count(**asked)
    answer = await create(served, **asked)
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", answer.usage.input_tokens)
    asked["previous_response_id"] = first.id
    counted = await served.openai.responses.input_tokens.count(**asked)
    answer = await create(served, **asked)
    assert counted.input_tokens == answer.usage.input_tokens
    assert len(served.core.submitted) == 3


async def test_only_what_the_model_could_nearly_read_is_counted(served: Served) -> None:
    """The exact number is reported up to a few times the context length, so that clients learn how much is too much."""
    bound = served.core.tokenizer.text_limit.bytes_per_token
    size = 8 * served.core.plan.model.context_length * bound
    for route in ("/v1/responses/input_tokens", "/v1/messages/count_tokens", "/tokenize"):
        for text, status in (("a" * (size // 8), 200), ("a" * (size + bound), 400)):
            body = {"messages": [{"role": "user", "content": text}]}
            if "responses" in route:
                body = {"input": text}
            answer = await served.http.post(route, json={"model": fake_core.MODEL, **body})
            assert answer.status_code == status, (route, answer.text[:200])
            if status == 400:
                assert "8 times the model's context" in answer.text


async def test_events_come_in_the_documented_order(served: Served) -> None:
    found = await events(served)
    kinds = [event["type"] for event in found]
    num_deltas = kinds.count("response.output_text.delta")
    assert num_deltas > 3
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * num_deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event["delta"] for event in found if "delta" in event) == fake_core.TEXT
    assert found[-1]["response"]["output"] == [found[-2]["item"]]
    assert found[0]["response"]["output"] == []
    assert len({event["item_id"] for event in found if "item_id" in event}) == 1


async def test_clients_own_accumulator_makes_the_whole_answer(served: Served) -> None:
    async with served.openai.responses.stream(**BODY) as stream:
        kinds = [event.type async for event in stream]
        final: Any = await stream.get_final_response()
    assert kinds[-1] == "response.completed"
    assert final.output_text == fake_core.TEXT
    assert final.usage.output_tokens > 10


async def test_output_that_is_cut_is_incomplete(served: Served) -> None:
    answer = await create(served, max_output_tokens=3)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.output[0].status, answer.usage.output_tokens) == ("incomplete", 3)
    found = await events(served, max_output_tokens=3)
    assert found[-1]["type"] == "response.incomplete"
    assert found[-2]["item"]["status"] == "incomplete"


async def test_conversation_goes_on_from_a_stored_response(served: Served) -> None:
    first = await create(served, instructions="Be brief.")
    second = await create(served, input="And then?", previous_response_id=first.id)
    streamed = await events(served, input="More", previous_response_id=second.id)
    third = streamed[-1]["response"]["id"]
    await create(served, input="Enough", previous_response_id=third)
    one, two, three, four = (request.text or "" for request in served.core.submitted)
    assert two.startswith(f"<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n{fake_core.TEXT}")
    assert "Be brief." in one
    assert "Be brief." not in two  # instructions apply to one response only
    assert four.count(fake_core.TEXT) == 3
    assert three.endswith("<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n")


async def test_items_of_all_kinds_make_the_prompt(served: Served) -> None:
    call = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
    items: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {
            "type": "reasoning",
            "id": "rs_1",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "Hm"}],
        },
        {"role": "assistant", "content": "Adding."},
        call,
        {**call, "call_id": "c2", "arguments": '{"a": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
        {"role": "user", "content": "Go on"},
    ]
    await create(served, input=items)
    prompt = served.core.submitted[0].text or ""
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello")
    places = [prompt.index(words) for words in ("Adding.", '{"a": 1}', '{"a": 2}', "one", "two", "Go on")]
    assert places == sorted(places)
    assert prompt.count("<|im_start|>assistant") == 2  # reasoning, text and calls form one message


async def test_stored_responses_come_back_until_they_are_deleted(served: Served) -> None:
    client = served.openai.responses
    made = await create(served)
    assert (await client.retrieve(made.id)).output_text == fake_core.TEXT
    [item] = (await client.input_items.list(made.id)).data
    assert item.content[0].text == "Hello"  # type: ignore[union-attr]
    reference = {"type": "item_reference", "id": made.output[0].id}
    await create(served, input=[reference, {"role": "user", "content": "Again"}])
    assert fake_core.TEXT in (served.core.submitted[-1].text or "")
    await client.delete(made.id)
    for gone in (client.retrieve(made.id), client.delete(made.id)):
        with pytest.raises(openai.NotFoundError):
            await gone
    with pytest.raises(openai.BadRequestError) as caught:
        await create(served, previous_response_id=made.id)
    assert caught.value.param == "previous_response_id"


async def test_what_is_not_to_be_stored_is_not(served: Served) -> None:
    made = await create(served, store=False)
    with pytest.raises(openai.NotFoundError):
        await served.openai.responses.retrieve(made.id)


async def test_responses_belong_to_their_key(serve: Serve, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann one\nbob two\n")
    served = await serve(api_key_file=str(keys))
    ann, bob = (served.openai.with_options(api_key=key).responses for key in ("one", "two"))
    made = await ann.create(**BODY)
    assert (await ann.retrieve(made.id)).id == made.id
    with pytest.raises(openai.NotFoundError):
        await bob.retrieve(made.id)
    with pytest.raises(openai.BadRequestError):
        await bob.create(**BODY, previous_response_id=made.id)


async def test_memory_counts_the_whole_conversation(served: Served) -> None:
    first = await create(served, input="x" * 200)
    second = await create(served, input="y" * 100, previous_response_id=first.id)
    store = served.responses
    one, two = (store.get(made.id, "") for made in (first, second))
    assert one.num_bytes > 200 + len(fake_core.TEXT)
    assert two.num_bytes > one.num_bytes + 100 + len(fake_core.TEXT)
    assert store.num_bytes == one.num_bytes + two.num_bytes


async def test_background_response_is_polled(serve: Serve) -> None:
    served = await serve(held=True)
    client = served.openai.responses
    made = await create(served, background=True, max_output_tokens=2)
    assert (made.status, made.background, made.output) == ("in_progress", True, [])
    with pytest.raises(openai.BadRequestError, match="not completed"):
        await create(served, previous_response_id=made.id)
    served.core.step()
    assert (await client.retrieve(made.id)).status == "in_progress"
    served.core.step()
    while (found := await client.retrieve(made.id)).status == "in_progress":
        await asyncio.sleep(0)
    assert (found.status, found.output_text) == ("incomplete", "Once")
    assert (await client.cancel(made.id)).status == "incomplete"


async def test_background_response_is_cancelled(serve: Serve) -> None:
    served = await serve(held=True)
    client = served.openai.responses
    made = await create(served, background=True)
    served.core.step()
    cancelled = await client.cancel(made.id)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "On")
    assert served.core.num_open == 0
    other = await create(served, background=True)
    await client.delete(other.id)
    while served.core.num_open:
        await asyncio.sleep(0)


async def test_only_background_responses_are_cancelled(served: Served) -> None:
    made = await create(served)
    with pytest.raises(openai.BadRequestError, match="background"):
        await served.openai.responses.cancel(made.id)


async def test_failure_in_the_background_is_told(serve: Serve) -> None:
    served = await serve(held=True)
    made = await create(served, background=True)
    served.core.step()
    served.fail()
    while (found := await served.openai.responses.retrieve(made.id)).status == "in_progress":
        await asyncio.sleep(0)
    assert found.status == "failed"
    assert found.error is not None
    assert (found.error.code, found.error.message) == ("server_error", "A step failed.")


async def test_failure_in_a_stream_is_its_last_event(serve: Serve) -> None:
    served = await serve(held=True)
    lines = await served.lines_after(served.fail, "/v1/responses", **BODY)
    found = checked("\n".join(lines).removesuffix("\n").split("\n\n"))
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["error"]["message"] == "A step failed."


async def test_aborted_response_has_failed(serve: Serve) -> None:
    served = await serve(held=True)
    lines = await served.lines_after(served.core.abort_all, "/v1/responses", **BODY)
    found = checked("\n".join(lines).removesuffix("\n").split("\n\n"))
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["error"]["message"] == "The request was aborted."


async def test_logprobs_come_when_they_are_included(served: Served) -> None:
    include: Any = ["message.output_text.logprobs"]
    whole = await create(served, include=include, top_logprobs=2, max_output_tokens=3)
    found = whole.output[0].content[0].logprobs
    assert [token.logprob for token in found] == [-0.25, -0.5, -0.75]
    assert [top.logprob for top in found[0].top_logprobs] == [-0.25, -1.25]
    streamed = await events(served, include=include, top_logprobs=2, max_output_tokens=3)
    told = [token["token"] for event in streamed if "delta" in event for token in event["logprobs"]]
    assert told == [token.token for token in found]


async def test_truncation_drops_the_oldest_turns(served: Served) -> None:
    turns: list[Any] = []
    for number in range(8):
        turns.append({"role": "user", "content": f"Question {number} " + "long " * 60})
        turns.append({"role": "assistant", "content": f"Answer {number}"})
    turns.append({"role": "user", "content": "The last"})
    with pytest.raises(openai.BadRequestError, match="too long"):
        await create(served, input=turns, instructions="Be brief.", max_output_tokens=8)
    await create(served, input=turns, instructions="Be brief.", max_output_tokens=8, truncation="auto")
    prompt = served.core.submitted[-1].text or ""
    assert prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nQuestion")
    assert "Question 0" not in prompt
    assert "Question 7" in prompt
    assert "The last" in prompt
    num_tokens = len(served.core.tokenizer.encode_batch([prompt])[0])
    assert 300 < num_tokens <= fake_core.CONTEXT - 8


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": []}, "input"),
        ({"input": "long " * 600}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"input": [{"type": "computer_call"}]}, "input.0.type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input.0.content.0.type"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input.0.call_id"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.id"),
        ({"tools": [{"type": "file_search"}]}, "tools.0.type"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [{"name": "f"}]}}, "tool_choice.tools"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "stream": True}, "stream"),
        ({"include": ["everything"]}, "include.0"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_token": 3}, "max_token"),
        ({"max_tokens": 3}, "max_output_tokens"),
        ({"n": 2}, "n"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ],
)
async def test_wrong_parameter_is_named(served: Served, change: dict[str, Any], param: str) -> None:
    response = await served.http.post("/v1/responses", json={**BODY, **change})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
