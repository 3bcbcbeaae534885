"""Fields that clients of vLLM and SGLang send, answered by the demo model and compared with transformers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import http_server
from serve import Engine
from serve.demo import demo_path
from serve.server.app import build_app
from serve.server.connection import Connection

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 6,
    "temperature": 0,
    "ignore_eos": True,
}
COMPLETION: dict[str, Any] = {"prompt": "The capital of", "max_tokens": 6, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def reference() -> Any:
    path = str(demo_path())
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(path), model.eval()


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with AsyncExitStack() as stack:
        engine = await stack.enter_async_context(Engine(dtype="float32", random_seed=1))
        url = await stack.enter_async_context(http_server.serving(build_app(engine.core), http=Connection))
        yield await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def events(client: httpx.AsyncClient, path: str, **body: Any) -> list[Any]:
    answer = await client.post(path, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def prompt_ids(reference: Any, chat: bool) -> list[int]:
    tokenizer, _ = reference
    if chat:
        return tokenizer.apply_chat_template(CHAT["messages"], add_generation_prompt=True)["input_ids"]
    return tokenizer(COMPLETION["prompt"])["input_ids"]


async def test_token_ids_are_those_of_transformers(client: httpx.AsyncClient, reference: Any) -> None:
    _, model = reference
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        is_chat = "messages" in body
        ids = prompt_ids(reference, is_chat)
        output = model.generate(torch.tensor([ids]), max_new_tokens=6, min_new_tokens=6, do_sample=False)[0, len(ids) :]
        answer = await post(client, path, **body, return_token_ids=True, n=2)
        for choice in answer["choices"]:
            assert choice["token_ids"] == output.tolist()
            assert (answer if is_chat else choice)["prompt_token_ids"] == ids
        pieces = await events(client, path, **body, return_token_ids=True)
        choices = [choice for piece in pieces for choice in piece["choices"]]
        assert [token for choice in choices for token in choice.get("token_ids", ())] == output.tolist()
        told = [each["prompt_token_ids"] for each in (pieces if is_chat else choices) if "prompt_token_ids" in each]
        assert told == [ids]
        plain = await post(client, path, **body)
        assert "token_ids" not in plain["choices"][0]
        assert "prompt_token_ids" not in json.dumps(plain)


async def test_prompt_logprobs_are_those_of_transformers(client: httpx.AsyncClient, reference: Any) -> None:
    tokenizer, model = reference
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        is_chat = "messages" in body
        ids = prompt_ids(reference, is_chat)
        with torch.inference_mode():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        answer = await post(client, path, **body, prompt_logprobs=2)
        told = (answer if is_chat else answer["choices"][0])["prompt_logprobs"]
        assert answer["choices"][0]["logprobs"] is None
        assert told[0] is None
        assert len(told) == len(ids)
        for position, entries in enumerate(told[1:]):
            best = logprobs[position].topk(2).indices.tolist()
            assert set(entries) == {str(each) for each in (*best, ids[position + 1])}
            assert next(iter(entries)) == str(ids[position + 1])
            for token, entry in entries.items():
                assert entry["logprob"] == pytest.approx(float(logprobs[position, int(token)]), abs=2e-3)
                assert entry["decoded_token"] == tokenizer.decode([int(token)])
                assert entry["rank"] == (best.index(int(token)) if int(token) in best else len(best)) + 1


async def test_prompt_logprobs_change_no_other_logprobs(client: httpx.AsyncClient) -> None:
    plain = await post(client, "/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=1)
    both = await post(client, "/v1/chat/completions", **CHAT, logprobs=True, top_logprobs=1, prompt_logprobs=3)
    assert [len(each["top_logprobs"]) for each in both["choices"][0]["logprobs"]["content"]] == [1] * 6
    assert both["choices"] == plain["choices"]
    plain = await post(client, "/v1/completions", **COMPLETION, logprobs=1)
    both = await post(client, "/v1/completions", **COMPLETION, logprobs=1, prompt_logprobs=3)
    assert both["choices"][0]["logprobs"] == plain["choices"][0]["logprobs"]
    answer = await client.post("/v1/completions", json={**COMPLETION, "prompt_logprobs": 1, "stream": True})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "prompt_logprobs"


async def test_loads_are_those_of_the_replicas(client: httpx.AsyncClient) -> None:
    loads = (await client.get("/v1/loads")).json()
    assert [each["dp_rank"] for each in loads["loads"]] == [0]
    assert (loads["dp_rank_count"], loads["aggregate"]["total_reqs"]) == (1, 0)
