"""Embeddings over HTTP with the official client, against transformers."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import numpy as np
import ollama
import openai
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import http_server
from serve import Engine, InvalidRequest
from serve.demo import demo_path
from serve.server.app import build_app

TEXTS = ["What is the capital of France?", "Paris is the capital of France.", "Bananas are yellow."]


@pytest.fixture(scope="module")
def wanted() -> list[list[float]]:
    """Return the last hidden state of each text's last token, normalised to length 1."""
    path = str(demo_path())
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path, dtype=torch.float32)
    vectors = []
    for text in TEXTS:
        with torch.no_grad():
            hidden = model(torch.tensor([tokenizer(text).input_ids])).last_hidden_state[0, -1]
        vectors.append(torch.nn.functional.normalize(hidden, dim=-1).tolist())
    return vectors


@pytest.fixture
async def url(request: pytest.FixtureRequest) -> AsyncIterator[str]:
    options: dict[str, Any] = getattr(request, "param", {})
    async with (
        Engine(dtype="float32", max_total_tokens=2048, **options) as engine,
        http_server.serving(build_app(engine.core)) as address,
    ):
        yield address


async def test_the_official_client_gets_vectors(url: str, wanted: list[list[float]]) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        found = await client.embeddings.create(model="default", input=TEXTS, encoding_format="float")
        assert [each.index for each in found.data] == [0, 1, 2]
        for each, vector in zip(found.data, wanted, strict=True):
            assert each.embedding == pytest.approx(vector, abs=1e-4)
        assert found.usage.prompt_tokens == found.usage.total_tokens > 3
        # base64, which the client decodes
        packed = await client.embeddings.create(model="default", input=TEXTS[0])
        assert packed.data[0].embedding == pytest.approx(found.data[0].embedding, abs=1e-6)
        short = await client.embeddings.create(model="default", input=TEXTS[0], dimensions=8)
    first = np.array(wanted[0][:8])
    assert short.data[0].embedding == pytest.approx((first / np.linalg.norm(first)).tolist(), abs=1e-4)


async def test_ids_lists_of_ids_and_base64(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:

        async def embed(**body: Any) -> list[dict[str, Any]]:
            answer = await client.post("/v1/embeddings", json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()["data"]

        [one] = await embed(input=[5, 6, 7])
        two = await embed(input=[[5, 6, 7], [8, 9]])
        [packed] = await embed(input=[5, 6, 7], encoding_format="base64")
        native = (await client.post("/encode", json={"input_ids": [[5, 6, 7], [8, 9]]})).json()
    assert [each["embedding"] for each in two] == [pytest.approx(each["embedding"], abs=1e-5) for each in native]
    assert one["embedding"] == pytest.approx(two[0]["embedding"], abs=1e-5)
    assert np.frombuffer(base64.b64decode(packed["embedding"]), "<f4") == pytest.approx(one["embedding"], abs=1e-5)
    assert native[0]["meta_info"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input.1"),
        ({"input": ["a", 5]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 10_000}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "model": "no-such"}, "model"),
    ],
)
async def test_what_is_wrong_is_named(url: str, body: dict[str, Any], param: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        answer = await client.post("/v1/embeddings", json=body)
    assert answer.status_code in (400, 404)
    assert answer.json()["error"]["param"].startswith(param)


async def test_too_long_a_text_is_not_tokenized(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        refused = await client.post("/tokenize", json={"prompt": "a " * 900_000})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "prompt")
    assert f"{8 * 2048} tokens" in error["message"]


@pytest.mark.parametrize("url", [{"is_embedding": True}], indirect=True)
async def test_an_engine_for_embeddings_generates_nothing(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        assert (await client.post("/encode", json={"text": "a"})).status_code == 200
        refused = await client.post("/generate", json={"text": "a"})
        assert (refused.status_code, "--is-embedding" in refused.text) == (400, True)
        assert (await client.get("/health_generate")).status_code == 200
        assert (await client.get("/get_model_info")).json()["is_generation"] is False


@pytest.mark.parametrize("stream", [False, True])
async def test_output_that_does_not_fit_ends_with_the_context(url: str, stream: bool) -> None:
    """Clients of Anthropic's and Ollama's APIs set large limits for any model."""
    asked: Any = {"model": "default", "max_tokens": 16_000}

    def turns(words: int) -> Any:
        return [{"role": "user", "content": "Tell" + " the" * words}]

    async with anthropic.AsyncAnthropic(base_url=url, api_key="none") as client:
        counted = await client.messages.count_tokens(model="default", messages=turns(1000))
        asked["messages"] = turns(1000 + 2046 - counted.input_tokens)
        if stream:
            async with client.messages.stream(**asked, extra_body={"temperature": 0}) as events:
                message = await events.get_final_message()
        else:
            message = await client.messages.create(**asked, extra_body={"temperature": 0})
        short = await client.messages.create(**{**asked, "max_tokens": 1})
    assert (message.stop_reason, message.usage.output_tokens) == ("model_context_window_exceeded", 2)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 1)
    options = {"num_predict": 32_000, "temperature": 0}
    found = await ollama.AsyncClient(host=url).chat("default", asked["messages"], options=options)
    assert (found.done_reason, found.eval_count) == ("length", 2)


async def test_ollamas_client_gets_the_same_vectors(url: str, wanted: list[list[float]]) -> None:
    client = ollama.AsyncClient(host=url)
    found = await client.embed("default", TEXTS)
    assert found.prompt_eval_count
    assert found.total_duration
    for each, vector in zip(found.embeddings, wanted, strict=True):
        assert each == pytest.approx(vector, abs=1e-4)
    short = await client.embed("default", TEXTS[0], dimensions=8)
    assert len(short.embeddings[0]) == 8
    assert (await client.embeddings("default", TEXTS[0])).embedding == pytest.approx(wanted[0], abs=1e-4)
    assert len((await client.embed("default", "long " * 10_000)).embeddings) == 1  # truncated, as in Ollama
    for wrong in (
        {"input": "a " * 10_000, "truncate": False},
        {"input": ["a", ""]},
        {"input": "a", "dimensions": 0},
    ):
        with pytest.raises(ollama.ResponseError) as refused:
            await client._request_raw("POST", "/api/embed", json={"model": "default", **wrong})
        assert refused.value.status_code == 400, wrong


async def test_python_refuses_in_the_same_words() -> None:
    async with Engine(is_embedding=True, max_total_tokens=2048) as engine:
        assert len((await engine.encode("a"))["embedding"]) == engine.core.facts.hidden_size
        with pytest.raises(InvalidRequest, match="--is-embedding"):
            await engine.generate("a")


async def test_messages_are_embedded_as_the_chat_template_writes_them(url: str) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    async with httpx.AsyncClient(base_url=url) as http:
        text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        answers = [await http.post("/v1/embeddings", json=b) for b in ({"messages": messages}, {"input": text})]
        found = [answer.json()["usage"]["prompt_tokens"] for answer in answers]
        assert found[1] - 1 <= found[0] <= found[1] + 8  # the demo's template adds an empty thought
        for body, message in (
            ({"messages": messages, "input": "a"}, "either input or messages"),
            ({}, "either input or messages"),
            ({"input": "a", "truncate_prompt_tokens": 3}, "truncate_prompt_tokens must be -1"),
        ):
            refused = await http.post("/v1/embeddings", json=body)
            assert (refused.status_code, message in refused.text) == (400, True), refused.text
