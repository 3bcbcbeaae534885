"""Hidden states of prompts and outputs equal those of transformers, however they are computed."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import http_server
import tiny_checkpoints
from runtime.actors import input_processor
from runtime.errors import ConfigurationError, InvalidRequest
from runtime.request import TokenParts
from serve import Engine
from serve.demo import WEIGHTS
from serve.server.app import build_app
from weights_server import PLAIN, checkpoint, post

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12] * 4
SAMPLING = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
SMALL: dict[str, Any] = {"page_size": 4, "max_total_tokens": 96}
RETURNS: dict[str, Any] = {"enable_return_hidden_states": True}


def reference(path: str, ids: list[int]) -> np.ndarray:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        return model.model(torch.tensor([ids])).last_hidden_state[0].numpy()


async def states(engine: Engine, ids: list[int], **sampling: Any) -> tuple[list[int], np.ndarray]:
    options: dict[str, Any] = {"return_hidden_states": True}
    found = await engine.generate(input_ids=ids, sampling_params={**SAMPLING, **sampling}, **options)
    prompt, *output = found["meta_info"]["hidden_states"]
    assert found["meta_info"]["cached_tokens"] == 0
    return found["output_ids"], np.concatenate([prompt, *([np.stack(output)] if output else [])])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="graph"),
        pytest.param({"chunked_prefill_size": 8, "page_size": 4}, id="chunks"),
        pytest.param({"attention_backend": "torch_native"}, id="operations", marks=pytest.mark.slow),
        pytest.param({"speculative_algorithm": "NGRAM"}, id="drafts", marks=pytest.mark.slow),
        pytest.param({"tp_size": 2}, id="tp", marks=pytest.mark.slow),
    ],
)
async def test_states_are_those_of_transformers(options: dict[str, Any]) -> None:
    path = checkpoint(0)
    async with Engine(path, **PLAIN, **RETURNS, **options) as engine:
        prompts = [PROMPT, PROMPT[:9], [7]]
        plain = engine.generate(input_ids=PROMPT, sampling_params=SAMPLING)  # another row of the same steps
        together = asyncio.gather(*(states(engine, ids) for ids in prompts))
        found, other = await asyncio.gather(together, plain)
        assert "hidden_states" not in other["meta_info"]
        for ids, (output, got) in zip(prompts, found, strict=True):
            wanted = reference(path, [*ids, *output[:-1]])
            assert got.shape == wanted.shape
            assert np.abs(got - wanted).max() < 1e-4
        again = await states(engine, PROMPT)  # its prefix is cached by now, and computed again for its states
        assert np.abs(again[1] - found[0][1]).max() < 1e-5
        _, only_prompt = await states(engine, PROMPT, max_new_tokens=0)
        assert np.abs(only_prompt - found[0][1][: len(PROMPT)]).max() < 1e-5
        engine.core.check()


async def test_retracted_requests_have_all_states() -> None:
    path = checkpoint(0)
    async with Engine(path, **PLAIN, **RETURNS, **SMALL) as engine:
        calls = [states(engine, [number, *PROMPT[:11]], max_new_tokens=40) for number in range(5, 9)]
        for (output, got), number in zip(await asyncio.gather(*calls), range(5, 9), strict=True):
            wanted = reference(path, [number, *PROMPT[:11], *output[:-1]])
            assert got.shape == wanted.shape
            assert np.abs(got - wanted).max() < 1e-4
        assert engine.status().num_retracted


async def test_a_choice_that_a_stop_string_ends_has_states() -> None:
    async with Engine(str(WEIGHTS), **RETURNS) as engine:
        options: dict[str, Any] = {"return_hidden_states": True}
        whole = await engine.generate("Once upon a time", sampling_params=SAMPLING, **options)
        stop = {**SAMPLING, "stop": [whole["text"].strip()[4:8]]}
        found = await engine.generate("Once upon a time", sampling_params=stop, **options)
        assert found["meta_info"]["finish_reason"]["type"] == "stop"
        prompt, *output = found["meta_info"]["hidden_states"]
        assert len(output) == found["meta_info"]["completion_tokens"] - 1 < 5
        wanted = whole["meta_info"]["hidden_states"]
        for one, other in zip([prompt, *output], wanted, strict=False):
            assert np.abs(one - other).max() < 1e-5


def test_parts_may_replace_others_and_have_a_last_state() -> None:
    parts = TokenParts()
    assert (parts.first(3), parts.last(3)) == (None, None)
    parts.add(0, np.zeros((4, 2), np.float32))
    parts.add(3, np.ones((3, 2), np.float32))
    states, last = parts.first(5), parts.last(5)
    assert states is not None
    assert last is not None
    assert states[:, 0].tolist() == [0, 0, 0, 1, 1]
    assert last.tolist() == [1, 1]
    fewer = parts.first(99)
    assert fewer is not None
    assert len(fewer) == 6


async def test_all_apis_return_them() -> None:
    async with (
        Engine(str(WEIGHTS), **RETURNS) as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        body = {"input_ids": [PROMPT, PROMPT[:3]], "sampling_params": SAMPLING}
        found = await post(http, "/generate", {**body, "return_hidden_states": [True, False]})
        prompt, *output = found[0]["meta_info"]["hidden_states"]
        assert (len(prompt), len(output), len(prompt[0])) == (len(PROMPT), 5, 256)
        assert "hidden_states" not in found[1]["meta_info"]
        _, direct = await states(engine, PROMPT)
        assert np.abs(np.array([*prompt, *output]) - direct).max() < 1e-6
        text = {"model": "default", "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_hidden_states": True}
        answer = await post(http, "/v1/completions", {**text, "prompt": PROMPT})
        assert np.abs(np.array(answer["choices"][0]["hidden_states"]) - direct[-1]).max() < 1e-6
        chat = {**text, "messages": [{"role": "user", "content": "Hi"}]}
        answer = await post(http, "/v1/chat/completions", chat)
        assert len(answer["choices"][0]["hidden_states"]) == 256
        predict = {"instances": [{"text": "a"}], "parameters": {"return_hidden_states": True}}
        await post(http, "/vertex_generate", predict, status=400)
        with pytest.raises(InvalidRequest, match=r"use Engine\.generate"):
            await engine.open([5], return_hidden_states=True).generate(2)
        for route, wrong in (("/v1/completions", {**text, "prompt": "a"}), ("/v1/chat/completions", chat)):
            refused = await post(http, route, {**wrong, "stream": True}, status=400)
            assert refused["error"]["param"] == "return_hidden_states"


async def test_prompts_of_a_call_share_the_limit_of_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tiny_checkpoints.cached("llama", vocab_size=131)
    async with Engine(ids, **PLAIN, **RETURNS) as engine:
        monkeypatch.setattr(input_processor, "MAX_HIDDEN_NUMBERS", 12 * engine.core.facts.hidden_size)
        transport = httpx.ASGITransport(build_app(engine.core))
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
            body = {"return_hidden_states": True, "sampling_params": {**SAMPLING, "max_new_tokens": 4}}
            for prompts, status in (([5] * 8, 200), ([5] * 9, 400), ([[5] * 2] * 2, 200), ([[5] * 2, [5] * 3], 400)):
                answer = await http.post("/generate", json={**body, "input_ids": prompts})
                assert answer.status_code == status, answer.text
            assert "in a call with 2 prompts" in answer.text


async def test_what_cannot_be_returned_is_refused() -> None:
    ids = tiny_checkpoints.cached("llama", vocab_size=131)
    options: dict[str, Any] = {"return_hidden_states": True}
    async with Engine(ids, **PLAIN) as engine:
        with pytest.raises(InvalidRequest, match="--enable-return-hidden-states"):
            await engine.generate(input_ids=[5], sampling_params=SAMPLING, **options)
    async with Engine(ids, **PLAIN, **RETURNS) as engine:
        with pytest.raises(InvalidRequest, match="at most 16 choices"):
            await engine.generate(input_ids=[[5]] * 17, sampling_params=SAMPLING, **options)
        with pytest.raises(InvalidRequest, match="cannot be streamed"):
            async for _ in engine.stream(input_ids=[5], sampling_params=SAMPLING, **options):
                pass
    with pytest.raises(ConfigurationError, match="pp-size"):
        async with Engine(ids, **PLAIN, **RETURNS, pp_size=2):
            pass
