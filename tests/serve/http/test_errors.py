"""Error bodies that clients can read. JavaScript clients (openai, Vercel's ai) read only `error.message`."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import fake_core
from runtime.errors import EngineClosed, Overloaded
from served_core import Serve, Served

GENERATING = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/completions": {"prompt": "Hello"},
    "/generate": {"text": "Hello"},
}
BODIES = GENERATING | {
    "/v1/tokenize": {"prompt": "Hello"},
    "/v1/detokenize": {"tokens": [5]},
    "/abort_request": {"rid": "mine"},
}


def check(response: Any, status: int) -> dict[str, Any]:
    """Return the `error` object, after checking that every client can read it."""
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert isinstance(error["message"], str)
    assert error["message"]
    assert isinstance(error["type"], str)
    return error


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"prompt": 5, "messages": 5, "text": 5, "rid": 5, "tokens": "a"}']
)
async def test_refused_body(served: Served, path: str, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    assert check(await served.http.post(path, content=content, headers=headers), 400)["code"] == 400


@pytest.mark.parametrize(
    "path", [*GENERATING, "/v1/messages", "/v1/embeddings", "/encode", "/classify", "/v1/rerank", "/v1/score"]
)
async def test_a_full_queue_refuses_before_it_reads(served: Served, path: str) -> None:
    served.core.refusal = Overloaded("The request queue is full.", retry_after_s=3)
    response = await served.http.post(path, content=b"{", headers={"content-type": "application/json"})
    check(response, 503)
    assert response.headers["retry-after"] == "3"
    assert (await served.http.post("/v1/tokenize", json={"prompt": "Hello"})).status_code == 200


async def test_a_refused_body_is_gone_with_its_answer(served: Served) -> None:
    """Objects that wait for the garbage collector would stop every stream when they are freed."""
    # more items than allowed, which is detected in a late piece
    body = {"text": "Hi", "unknown": [{"a": [1, 2]}] * 26_000}
    gc.collect()
    gc.disable()
    try:
        assert (await served.http.post("/generate", json=body)).status_code == 413
        assert gc.collect() < 5_000
    finally:
        gc.enable()


@pytest.mark.parametrize("path", ["/v1/nothing", "/v1/models/other", "/nothing"])
async def test_what_does_not_exist(served: Served, path: str) -> None:
    check(await served.http.get(path), 404)


@pytest.mark.parametrize("path", BODIES)
async def test_wrong_method(served: Served, path: str) -> None:
    check(await served.http.delete(path), 405)


async def test_unknown_model(served: Served) -> None:
    for path in ("/v1/chat/completions", "/v1/completions"):
        check(await served.http.post(path, json={**GENERATING[path], "model": "other"}), 404)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/tokenize", "/v1/nothing"])
async def test_missing_key_on_an_openai_path(serve: Serve, path: str) -> None:
    served = await serve(api_key="open-sesame")
    assert check(await served.http.post(path, json={}), 401)["type"] == "AuthenticationError"


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("stream", [False, True])
async def test_engine_that_refuses_or_fails(serve: Serve, path: str, stream: bool) -> None:
    served, broken = await serve(), await serve(fake_core.BrokenCore(None))
    body = {**GENERATING[path], "stream": stream}
    for refusal in (Overloaded("Too much is waiting."), EngineClosed("The engine is draining.")):
        served.core.refusal = refusal
        check(await served.http.post(path, json=body), 503)
    if path == "/generate":
        error = check(await broken.http.post(path, json={"input_ids": [5], "stream": stream}), 500)
        assert "secret" not in error["message"]


@pytest.mark.parametrize("path", GENERATING)
async def test_flat_fields_of_the_original_surface_stay(served: Served, path: str) -> None:
    served.core.refusal = Overloaded("Too much is waiting.")
    body = (await served.http.post(path, json=GENERATING[path])).json()
    assert (body["object"], body["message"], body["code"]) == ("error", "Too much is waiting.", 503)
