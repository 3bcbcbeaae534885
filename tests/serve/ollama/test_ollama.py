"""Ollama's routes with its client. Every streamed line is checked against the client's types."""

from __future__ import annotations

from typing import Any

import ollama
import orjson
import pytest

import fake_core
from runtime.errors import Overloaded
from served_core import Serve, Served

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
BODY: dict[str, Any] = {"model": fake_core.MODEL, "messages": HELLO}


def client_of(served: Served) -> ollama.AsyncClient:
    return ollama.AsyncClient(host=served.url)


async def chat(served: Served, **options: Any) -> Any:
    return await client_of(served).chat(model=fake_core.MODEL, messages=HELLO, **options)


async def lines(served: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    response = await served.http.post(path, json={"model": fake_core.MODEL, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [orjson.loads(line) for line in response.text.splitlines()]


async def test_message_is_answered_with_measured_durations(served: Served) -> None:
    answer = await chat(served)
    assert (answer.message.role, answer.message.content) == ("assistant", fake_core.TEXT)
    assert (answer.done, answer.done_reason, answer.model) == (True, "stop", fake_core.MODEL)
    [request] = served.core.submitted
    assert answer.prompt_eval_count == len(served.core.tokenizer.encode_batch([request.text])[0])
    assert answer.eval_count > 10
    assert answer.total_duration == answer.prompt_eval_duration + answer.eval_duration
    assert min(answer.prompt_eval_duration, answer.eval_duration) > 0


async def test_lines_are_streamed_unless_told_otherwise(served: Served) -> None:
    found = await lines(served, "/api/chat", messages=HELLO)
    for line in found:
        ollama.ChatResponse.model_validate(line)
    assert [line["done"] for line in found] == [False] * (len(found) - 1) + [True]
    assert len(found) > 4
    assert "".join(line["message"]["content"] for line in found) == fake_core.TEXT
    assert found[-1]["done_reason"] == "stop"
    assert found[-1]["eval_duration"] > 0


async def test_client_streams_what_it_gets_whole(served: Served) -> None:
    whole = await chat(served)
    parts = [part async for part in await chat(served, stream=True)]
    assert "".join(part.message.content for part in parts) == whole.message.content
    assert parts[-1].eval_count == whole.eval_count


async def test_prompt_is_a_chat_of_one_turn_unless_raw(served: Served) -> None:
    client = client_of(served)
    answer = await client.generate(fake_core.MODEL, "Hello", system="Be brief.")
    assert answer.response == fake_core.TEXT
    await client.generate(fake_core.MODEL, "Hello", raw=True)
    templated, raw = (request.text for request in served.core.submitted)
    assert templated == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    assert raw == "Hello"
    found = await lines(served, "/api/generate", prompt="Hello")
    for line in found:
        ollama.GenerateResponse.model_validate(line)
    assert "".join(line["response"] for line in found) == fake_core.TEXT


async def test_nothing_asked_loads_the_model(served: Served) -> None:
    client = client_of(served)
    generated = await client.generate(fake_core.MODEL, "")
    chatted = await client.chat(fake_core.MODEL, [])
    assert (generated.done, generated.done_reason) == (chatted.done, chatted.done_reason) == (True, "load")
    assert served.core.submitted == []


async def test_options_become_sampling_parameters(served: Served) -> None:
    options = {
        "num_predict": 7,
        "temperature": 0.3,
        "top_k": 0,
        "top_p": 0.5,
        "min_p": 0.1,
        "seed": 4,
        "stop": ["engine"],
        "repeat_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "num_ctx": 4096,
    }
    await chat(served, options=options)
    await chat(served, options={"num_predict": -1, "seed": -1})
    first, second = (request.sampling for request in served.core.submitted)
    assert (first.max_new_tokens, first.temperature, first.top_k, first.top_p) == (7, 0.3, -1, 0.5)
    assert (first.min_p, first.seed, first.stop, first.repetition_penalty) == (0.1, 4, ("engine",), 1.2)
    assert (first.presence_penalty, first.frequency_penalty) == (0.5, 0.25)
    assert (second.max_new_tokens, second.seed) == (None, None)


async def test_why_it_ended(served: Served) -> None:
    cut = await chat(served, options={"num_predict": 3})
    assert (cut.done_reason, cut.eval_count) == ("length", 3)


async def test_logprobs_stand_with_their_text(served: Served) -> None:
    whole = await chat(served, logprobs=True, top_logprobs=2, options={"num_predict": 3})
    assert [token.logprob for token in whole.logprobs] == [-0.25, -0.5, -0.75]
    assert [top.logprob for top in whole.logprobs[0].top_logprobs] == [-0.25, -1.25]
    found = await lines(served, "/api/chat", messages=HELLO, logprobs=True, options={"num_predict": 3})
    streamed = [token["token"] for line in found for token in line.get("logprobs", [])]
    assert streamed == [token.token for token in whole.logprobs]


async def test_earlier_calls_and_thoughts_reach_the_template(served: Served) -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_name": "add", "content": "2"},
    ]
    await client_of(served).chat(fake_core.MODEL, messages)
    assert '{"name": "add", "arguments": {"a": 1}}' in (served.core.submitted[0].text or "")


async def test_model_is_listed_and_described(served: Served) -> None:
    client = client_of(served)
    listed: Any = (await client.list()).models[0]
    [loaded] = (await client.ps()).models
    shown: Any = await client.show(f"{fake_core.MODEL}:latest")
    assert listed.model == loaded.model == fake_core.MODEL
    assert loaded.context_length == fake_core.CONTEXT
    assert shown.details.family == listed.details.family
    assert shown.modelinfo[f"{shown.details.family}.block_count"] == served.core.facts.num_layers
    assert "completion" in (shown.capabilities or [])
    assert "im_start" in (shown.template or "")
    assert (await served.http.get("/api/version")).json()["version"].count(".") == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"options": {"temperature": -1}}, "options.temperature must be"),
        ({"options": {"num_predict": 0}}, "options.num_predict must be at least 1"),
        ({"options": {"num_predct": 3}}, "did you mean num_predict?"),
        ({"options": {"mirostat": 1}}, "options.mirostat is not supported"),
        ({"options": {"repeat_penalty": 1.1, "repeat_last_n": 64}}, "options.repeat_last_n must be -1"),
        ({"options": {"repeat_penalty": 7}}, "options.repeat_penalty must be"),
        ({"format": "yaml"}, 'format must be "json"'),
        ({"top_logprobs": 2}, "top_logprobs requires logprobs"),
        (
            {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]},
            "No images are accepted",
        ),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role must be"),
        ({"messages": [{"role": "user", "content": "long " * 600}]}, "too long"),
        ({"message": HELLO}, "did you mean messages?"),
    ],
)
async def test_mistakes_are_told_in_this_apis_words(serve: Serve, change: dict[str, Any], words: str) -> None:
    served = await serve(refuse_unknown_fields=True)
    response = await served.http.post("/api/chat", json={**BODY, **change})
    assert response.status_code == 400
    assert list(response.json()) == ["error"]
    assert words in response.json()["error"]


async def test_errors_are_the_clients_own(serve: Serve) -> None:
    served = await serve()
    with pytest.raises(ollama.ResponseError) as unknown:
        await client_of(served).show("other")
    assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError) as absent:
        await client_of(served).pull(fake_core.MODEL)
    words = "Fetching models: this server does not support it yet."
    assert (absent.value.status_code, absent.value.error) == (501, words)
    served.core.refusal = Overloaded("The queue is full.")
    with pytest.raises(ollama.ResponseError) as busy:
        await chat(served)
    assert (busy.value.status_code, busy.value.error) == (503, "The queue is full.")


async def test_failure_in_a_stream_is_its_last_line(serve: Serve) -> None:
    served = await serve(held=True)
    found = await served.lines_after(served.fail, "/api/chat", **BODY)
    assert orjson.loads(found[-1]) == {"error": "A step failed."}


@pytest.mark.parametrize("declared", ["text/plain", "application/x-www-form-urlencoded", None])
async def test_bodies_need_no_content_type(served: Served, declared: str | None) -> None:
    headers = {} if declared is None else {"content-type": declared}
    raw = orjson.dumps({**BODY, "stream": False})
    answer = await served.http.post("/api/chat", content=raw, headers=headers)
    assert (answer.status_code, answer.json()["message"]["content"]) == (200, fake_core.TEXT)
    for path in ("/api/generate", "/api/embed", "/api/embeddings", "/api/show"):
        refused = await served.http.post(path, content=b'{"model": 1}', headers=headers)
        assert (refused.status_code, "model" in refused.text) == (400, True), path
    foreign = {**headers, "origin": "https://evil.example"}
    assert (await served.http.post("/api/chat", content=raw, headers=foreign)).status_code == 403
