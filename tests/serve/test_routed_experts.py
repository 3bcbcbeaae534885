"""The chosen experts of tokens in answers equal those of transformers, however the tokens are computed."""

from __future__ import annotations

import asyncio
import base64
from threading import Thread, current_thread
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import http_server
import tiny_checkpoints
import tiny_models
from runtime.actors import input_processor
from runtime.errors import ConfigurationError, InvalidRequest
from runtime.request import Chunk
from serve import Engine
from serve.calls.routed_experts import routed_experts
from serve.server.app import build_app
from weights_server import PLAIN, post

RETURNS: dict[str, Any] = {"enable_return_routed_experts": True}
SAMPLING = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
PROMPT = [3 + (7 * i) % 100 for i in range(33)]
SHAPE = {"vocab_size": 131, "head_dim": 16, "num_experts": 8, "max_position_embeddings": 512}
NUM_LAYERS, TOP_K = 3, 2


def model_path() -> str:
    return tiny_checkpoints.cached("qwen3_moe", **SHAPE)


def reference(ids: list[int]) -> np.ndarray:
    """Return the experts that transformers chooses, sorted, int [T, L, k]."""
    model: Any = tiny_checkpoints.auto_of(model_path()).from_pretrained(model_path(), dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    return torch.stack([each.topk(TOP_K, dim=-1).indices.sort(-1).values for each in logits], 1).numpy()


def decoded(text: str, num_layers: int = NUM_LAYERS) -> np.ndarray:
    """Decode the field as SGLang's clients do."""
    return np.sort(np.frombuffer(base64.b64decode(text), np.int32).reshape(-1, num_layers, TOP_K), -1)


async def routed(engine: Engine, ids: list[int], start: int = 0, **sampling: Any) -> tuple[dict[str, Any], np.ndarray]:
    options: dict[str, Any] = {"return_routed_experts": True, "routed_experts_start_len": start}
    found = await engine.generate(input_ids=ids, sampling_params={**SAMPLING, **sampling}, **options)
    return found, decoded(found["meta_info"]["routed_experts"])


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="graph"),
        pytest.param({"attention_backend": "torch_native", "chunked_prefill_size": 8, "page_size": 4}, id="chunks"),
        pytest.param({"speculative_algorithm": "NGRAM"}, id="drafts", marks=pytest.mark.slow),
        pytest.param({"tp_size": 2}, id="tp", marks=pytest.mark.slow),
        pytest.param({"tp_size": 2, "ep_size": 2, "ep_num_redundant_experts": 2}, id="copies", marks=pytest.mark.slow),
        pytest.param({"page_size": 4, "max_total_tokens": 120}, id="retracted", marks=pytest.mark.slow),
    ],
)
async def test_experts_are_those_of_transformers(options: dict[str, Any]) -> None:
    async with Engine(model_path(), **PLAIN, **RETURNS, **options) as engine:
        prompts = [PROMPT, PROMPT[:9], [7]]
        plain = engine.generate(input_ids=PROMPT, sampling_params=SAMPLING)  # another row of the same steps
        together = asyncio.gather(*(routed(engine, ids, max_new_tokens=30) for ids in prompts))
        found, other = await asyncio.gather(together, plain)
        assert "routed_experts" not in other["meta_info"]
        for ids, (answer, experts) in zip(prompts, found, strict=True):
            assert np.array_equal(experts, reference([*ids, *answer["output_ids"][:-1]]))
        longer = [*PROMPT, *found[0][0]["output_ids"], 5]  # the next turn: its prefix is cached
        whole, experts = await routed(engine, longer)
        assert whole["meta_info"]["cached_tokens"] == 0
        for start in (16, len(longer)):
            tail, fewer = await routed(engine, longer, start)
            assert tail["output_ids"] == whole["output_ids"]
            assert (tail["meta_info"]["cached_tokens"] > 0) == (start >= engine.core.plan.cache.page_size)
            assert np.array_equal(fewer, experts[start:])
        engine.core.check()
        assert ("max_total_tokens" not in options) or engine.status().num_retracted


async def test_layers_without_experts_have_zeros() -> None:
    path = tiny_checkpoints.cached("deepseek_v3", first_k_dense_replace=1)
    async with Engine(path, **PLAIN, **RETURNS) as engine:
        options: dict[str, Any] = {"return_routed_experts": True}
        found = await engine.generate(input_ids=[5, 6, 7], sampling_params=SAMPLING, **options)
        experts = decoded(found["meta_info"]["routed_experts"], engine.core.facts.num_layers)
        assert len(experts) == 8
        assert not experts[:, 0].any()
        assert (experts[:, 1:, 0] != experts[:, 1:, 1]).all()


async def test_all_apis_return_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async with (
        Engine(model_path(), **{**PLAIN, **RETURNS}) as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        body = {"input_ids": [PROMPT, PROMPT[:3]], "sampling_params": SAMPLING}
        wanted = {"return_routed_experts": [True, False], "routed_experts_start_len": 4}
        first, second = await post(http, "/generate", {**body, **wanted})
        assert "routed_experts" not in second["meta_info"]
        experts = decoded(first["meta_info"]["routed_experts"])
        assert np.array_equal(experts, reference([*PROMPT, *first["output_ids"][:-1]])[4:])
        refusals = (
            ({"routed_experts_start_len": 34}, "routed_experts_start_len"),
            ({"routed_experts_start_len": -1}, "routed_experts_start_len"),
            ({"stream": True}, "return_routed_experts"),
            ({"sampling_params": {**SAMPLING, "n": 65}}, "return_routed_experts"),
        )
        for wrong, param in refusals:
            asked = {"input_ids": PROMPT, "sampling_params": SAMPLING, "return_routed_experts": True, **wrong}
            assert (await post(http, "/generate", asked, status=400))["error"]["param"] == param
        most = (len(PROMPT) + SAMPLING["max_new_tokens"] - 4) * experts[0].size
        monkeypatch.setattr(input_processor, "MAX_EXPERT_NUMBERS", most)
        asked = {"input_ids": PROMPT, "sampling_params": SAMPLING, "return_routed_experts": True}
        assert (await post(http, "/generate", asked, status=400))["error"]["param"] == "return_routed_experts"
        await post(http, "/generate", {**asked, "routed_experts_start_len": 4})
        predict = {"instances": [{"input_ids": [5]}], "parameters": {"return_routed_experts": True}}
        await post(http, "/vertex_generate", predict, status=400)
        with pytest.raises(InvalidRequest, match=r"use Engine\.generate"):
            await engine.open([5], return_routed_experts=True).generate(2)


async def test_openai_clients_get_them_in_an_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[Thread] = []

    def encode(chunk: Chunk) -> str | None:
        threads.append(current_thread())
        return routed_experts(chunk)

    monkeypatch.setattr("serve.openai.completions.routed_experts", encode)
    monkeypatch.setattr("serve.calls.chat_completions.chat.routed_experts", encode)
    async with (
        Engine(tiny_models.cached("qwen3_moe"), random_seed=1, **RETURNS) as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        body = {"model": "default", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
        body["return_routed_experts"] = True
        answer = await post(http, "/v1/completions", {**body, "prompt": PROMPT})
        _, experts = await routed(engine, PROMPT)
        assert np.array_equal(decoded(answer["choices"][0]["sgl_ext"]["routed_experts"]), experts)
        chat = {**body, "messages": [{"role": "user", "content": "Hi"}]}
        answer = await post(http, "/v1/chat/completions", chat)
        found = decoded(answer["choices"][0]["sgl_ext"]["routed_experts"])
        assert len(found) == answer["usage"]["total_tokens"] - 1
        assert len(threads) == 2
        assert current_thread() not in threads  # they may be megabytes of text
        for route, wrong in (("/v1/completions", {**body, "prompt": "a"}), ("/v1/chat/completions", chat)):
            refused = await post(http, route, {**wrong, "stream": True}, status=400)
            assert refused["error"]["param"] == "return_routed_experts"


async def test_what_cannot_be_returned_is_refused() -> None:
    async with Engine(model_path(), **PLAIN) as engine:
        with pytest.raises(InvalidRequest, match="--enable-return-routed-experts"):
            await routed(engine, [5])
    for options, words in (({"pp_size": 2}, "pp-size"), ({"enable_torch_compile": True}, "not recorded")):
        with pytest.raises(ConfigurationError, match=words):
            async with Engine(model_path(), **PLAIN, **RETURNS, **options):
                pass
    with pytest.raises(ConfigurationError, match="this model has no experts"):
        async with Engine(tiny_checkpoints.cached("llama", vocab_size=131), **PLAIN, **RETURNS):
            pass
