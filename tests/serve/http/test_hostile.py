"""Hostile inputs get a 4xx without any other effect."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import orjson
import pytest

import fake_core
from runtime.errors import EngineClosed, Overloaded
from runtime.tokenizer.tokenizer import Tokenizer
from serve.calls.body import IDS_BYTES, TEXT_BYTES, max_body_bytes
from serve.calls.json_pieces import MAX_CONTAINERS, MAX_STRINGS
from serve.server import app
from served_core import Serve, Served

JSON = {"content-type": "application/json"}
CHAT, COMPLETION, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


@pytest.mark.parametrize("path", [CHAT, COMPLETION, GENERATE, "/abort_request", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"   ",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b'{"text": "a"',
        b'{"text": NaN}',
        b'{"text": "a", "x": 1e999}',
        b'{"text": "\\ud800"}',
        b'{"text": "\xff"}',
        b"\xef\xbb\xbf{}",
        b"[" * 40_000,
        b'{"a":' * 2000 + b"1" + b"}" * 2000,
        b'{"sampling_params": ' + b"[" * 1000 + b"]" * 1000 + b', "text": "a"}',
        b'{"prompt": {}, "text": 5, "messages": 5, "rid": [], "tokens": "x"}',
        b'{"prompt": null, "text": null, "messages": null, "tokens": null, "rid": null}',
    ],
)
async def test_malformed_body_is_refused(served: Served, path: str, raw: bytes) -> None:
    response = await served.http.post(path, content=raw, headers=JSON)
    assert response.status_code == 400
    assert "rror" in response.text
    assert served.core.submitted == []


@pytest.mark.parametrize(
    ("raw", "headers", "words"),
    [
        (b"{}", {"content-encoding": "gzip"}, "content-encoding (gzip)"),
        (b'{"text": "\xff"}', {}, "not UTF-8"),
        (b"\xef\xbb\xbf{}", {}, "byte order mark"),
        (b'{"text": NaN}', {}, "line 1, column 10"),
    ],
)
async def test_message_says_why_a_body_cannot_be_read(
    served: Served, raw: bytes, headers: dict[str, str], words: str
) -> None:
    response = await served.http.post(GENERATE, content=raw, headers={**JSON, **headers})
    assert (response.status_code, words in response.json()["error"]["message"]) == (400, True), response.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", ""]}, "text.1"),
        ({"text": "a", "stream": "yes"}, "stream"),
        ({"text": "a", "stream": 1}, "stream"),
        ({"text": 5}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": [[]]}, "input_ids.0"),
        ({"input_ids": [1, "2"]}, "input_ids.1"),
        ({"input_ids": [1, True]}, "input_ids.1"),
        ({"input_ids": [1, 2.5]}, "input_ids.1"),
        ({"input_ids": [-1]}, "input_ids"),
        ({"input_ids": [512]}, "input_ids"),
        ({"input_ids": [2**62]}, "input_ids"),
        ({"text": ["a"] * 1025}, "text"),
        ({"text": "a", "sampling_params": {"temperature": "1"}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"temperature": True}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"max_new_tokens": -1}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"top_p": 0}}, "sampling_params.top_p"),
        ({"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"n": 129}}, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"stop": [""]}}, "sampling_params.stop"),
        ({"text": "a", "sampling_params": {"stop": ["x"] * 65}}, "sampling_params.stop"),
        ({"text": "a", "sampling_params": {"stop": [1]}}, "sampling_params.stop.0"),
        ({"text": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "sampling_params.logit_bias"),
        ({"text": "a", "sampling_params": {"logit_bias": {"1": "x"}}}, "sampling_params.logit_bias.1"),
        ({"text": "a", "sampling_params": {"json_schema": [1]}}, "sampling_params.json_schema"),
        ({"text": "a", "sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
        ({"text": "a", "sampling_params": [{}, {}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"top_p": 2}]}, "sampling_params.1.top_p"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"n": 2}]}, "sampling_params"),
        ({"text": "a", "rid": ""}, "rid"),
        ({"text": "a", "rid": "x" * 1000}, "rid"),
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 1000}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -5}, "logprob_start_len"),
        ({"text": "a", "lora_path": 5}, "lora_path"),
        ({"text": "a", "image_data": 5}, "image_data"),
        ({"text": "a", "session_params": 5}, "session_params"),
        ({"text": "a", "custom_logit_processor": 5}, "custom_logit_processor"),
        ({"text": "a", "return_hidden_states": 5}, "return_hidden_states"),
        ({"text": "a", "input_embeds": [[0.5]]}, "input_embeds"),
    ],
)
async def test_generate_names_what_is_wrong(served: Served, body: dict[str, Any], param: str) -> None:
    response = await served.http.post(GENERATE, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"]
    assert served.core.num_open == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, "must be given."),
        ({"text": "a", "input_ids": [1]}, "together"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 2**31}}, "at most 2147483647, not 2147483648"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": -1}, "must be in [0, 128], not -1"),
    ],
)
async def test_message_says_which_limit_was_passed(served: Served, body: dict[str, Any], words: str) -> None:
    response = await served.http.post(GENERATE, json=body)
    assert words in response.json()["error"]["message"]


async def test_declared_length_over_the_cap_is_refused_unread(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(served.url.rsplit(":", 1)[1]))
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {IDS_BYTES + 1}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    writer.write(head.encode())
    answer = await reader.read()  # reads until the server closes, which does not wait for the body
    writer.close()
    assert b" 413 " in answer.splitlines()[0]
    assert orjson.loads(answer.split(b"\r\n\r\n")[1])["error"]["type"] == "PayloadTooLargeError"


async def test_chunked_body_over_the_cap_is_refused(served: Served) -> None:
    sent = 0

    async def parts() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 10 * IDS_BYTES:
            sent += 1_000_000
            yield b" " * 1_000_000

    try:
        response = await served.http.post(GENERATE, content=parts(), headers=JSON)
        assert response.status_code == 413
    except (httpx.WriteError, httpx.ReadError):
        pass  # the server closed while the client was still writing
    assert sent < 10 * IDS_BYTES


@pytest.mark.parametrize(("path", "limit"), [(CHAT, TEXT_BYTES), ("/tokenize", TEXT_BYTES), (GENERATE, IDS_BYTES)])
async def test_body_at_the_limit_is_read_and_one_byte_more_is_not(served: Served, path: str, limit: int) -> None:
    async def parts(body: bytes) -> AsyncIterator[bytes]:
        yield body[: limit // 2]
        yield body[limit // 2 :]

    for length, status in ((limit, 400), (limit + 1, 413)):
        body = b'{"stop": 5}'.ljust(length)
        response = await served.http.post(path, content=parts(body), headers=JSON)
        assert response.status_code == status
        if status == 413:
            assert f"more than the {limit} bytes" in response.json()["error"]["message"]


async def test_limit_of_bodies_is_an_option_and_grows_with_the_context(serve: Serve, tokenizer: Tokenizer) -> None:
    served = await serve(max_body_bytes=2000)
    for length, status in ((2000, 400), (2001, 413)):
        response = await served.http.post(GENERATE, content=b"{}".ljust(length), headers=JSON)
        assert response.status_code == status
    plan = fake_core.make_plan()
    large = replace(plan, model=replace(plan.model, context_length=500_000))
    assert max_body_bytes(large, takes_ids=False) == 4_000_000
    assert max_body_bytes(large, takes_ids=True) == IDS_BYTES


async def test_large_bodies_have_a_limit_together(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_LARGE_BYTES", 2_000_000)
    served = await serve()
    body, ended = b'{"text": "a"}'.ljust(1_500_000), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield body[:-1]
        await ended.wait()
        yield body[-1:]

    async def send(content: Any) -> int:
        return (await served.http.post(GENERATE, content=content, headers=JSON)).status_code

    first = asyncio.create_task(send(slow()))
    async with asyncio.timeout(10):
        while await send(body) != 503:
            await asyncio.sleep(0.01)
        assert await send(b'{"text": "a"}') == 200
        ended.set()
        assert await first == 200
        assert await send(body) == 200


@pytest.mark.parametrize("piece", [b"[],", b'{"a":1},', b'{"":[]},'])
async def test_body_of_many_small_values_is_refused_unparsed(served: Served, piece: bytes) -> None:
    body = b'{"text": ["\\"[", ' + piece * MAX_CONTAINERS + b'"a"]}'
    response = await served.http.post(GENERATE, content=body, headers=JSON)
    assert (response.status_code, response.json()["error"]["type"]) == (413, "PayloadTooLargeError")
    assert "lists and objects" in response.json()["error"]["message"]


async def test_body_of_many_keys_is_refused_unparsed(served: Served) -> None:
    body = b'{"text": "a", "x": {' + b'"":1,' * (2 * MAX_STRINGS) + b'"":1}}'
    response = await served.http.post(GENERATE, content=body, headers=JSON)
    assert (response.status_code, response.json()["error"]["type"]) == (413, "PayloadTooLargeError")
    assert "keys and strings" in response.json()["error"]["message"]


async def test_charset_beside_the_media_type_is_fine(served: Served) -> None:
    headers = {"content-type": "application/json; charset=utf-8"}
    response = await served.http.post(COMPLETION, content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nothing", 404), ("GET", "/v1/nothing", 404), ("GET", CHAT, 405), ("DELETE", GENERATE, 405)],
)
async def test_unknown_routes_answer_in_the_same_words(served: Served, method: str, path: str, status: int) -> None:
    response = await served.http.request(method, path)
    assert response.status_code == status
    assert response.json()["object"] == "error"
    assert response.json()["code"] == status


async def test_overload_says_when_to_come_again(served: Served) -> None:
    served.core.refusal = Overloaded("Too much is waiting.", retry_after_s=7)
    for path, body in ((GENERATE, {"text": "a"}), (COMPLETION, {"prompt": "a", "stream": True})):
        response = await served.http.post(path, json=body)
        assert (response.status_code, response.headers["retry-after"]) == (503, "7")
        assert response.json()["message"] == "Too much is waiting."


async def test_engine_errors_have_their_status_and_class(served: Served) -> None:
    served.core.refusal = EngineClosed("The engine is draining.")
    with pytest.raises(openai.InternalServerError) as caught:
        await served.openai.completions.create(model=fake_core.MODEL, prompt="a")
    assert caught.value.status_code == 503


async def test_error_before_the_first_chunk_of_a_stream_has_its_status(served: Served) -> None:
    response = await served.http.post(COMPLETION, json={"prompt": "long " * 600, "stream": True})
    assert response.status_code == 400
    assert response.json()["param"] == "prompt"
    served.core.failure = fake_core.broken_step()
    response = await served.http.post(GENERATE, json={"text": "a", "stream": True})
    assert (response.status_code, response.json()["message"]) == (500, "A step failed.")


@pytest.mark.parametrize(("path", "body"), [(GENERATE, {"text": "a"}), (COMPLETION, {"prompt": "a"})])
async def test_unknown_exceptions_are_logged_and_not_told(
    serve: Serve, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any]
) -> None:
    served = await serve(fake_core.BrokenCore(tokenizer))
    with caplog.at_level(logging.ERROR, "penstock.http"):
        response = await served.http.post(path, json=body)
    assert response.status_code == 500
    assert "secret" not in response.text
    [record] = [record for record in caplog.records if record.name == "penstock.http"]
    assert record.exc_info is not None
    assert "a secret of the house" in str(record.exc_info[1])
