"""The HTTP API with the real engine core and a runner without a model: ids in, ids out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import httpx
import pytest

import http_server
import scripted_core
from runtime.actors.engine_core import EngineCore
from runtime.errors import ContextOverflow
from serve.openai import completions
from serve.server.app import build_app


class Running(NamedTuple):
    core: EngineCore
    runner: scripted_core.ScriptedRunner
    http: httpx.AsyncClient


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    async with (
        scripted_core.running() as (core, runner),
        http_server.serving(build_app(core)) as url,
        httpx.AsyncClient(base_url=url) as client,
    ):
        yield Running(core, runner, client)


async def until(state: Callable[[], bool]) -> None:
    while not state():
        await asyncio.sleep(0)


def all_pages_back(core: EngineCore) -> bool:
    status = core.status()
    return status.num_requests == 0 and status.num_used_pages == 0


async def test_prompt_is_continued_to_its_length(running: Running) -> None:
    body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 9, "ignore_eos": True}}
    answer = (await running.http.post("/generate", json=body)).json()
    assert len(answer["output_ids"]) == 9
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 9}


async def test_client_that_leaves_gives_its_pages_back(running: Running) -> None:
    body = {"input_ids": [5] * 20, "sampling_params": {"max_new_tokens": 200, "ignore_eos": True, "n": 3}}
    async with running.http.stream("POST", "/generate", json={**body, "stream": True}) as response:
        async for _ in response.aiter_bytes():
            break
        running.runner.open.clear()
        assert not all_pages_back(running.core)
    running.runner.open.set()
    await until(lambda: all_pages_back(running.core))


async def test_wrong_parameters_are_named_as_the_client_knows_them(running: Running) -> None:
    for sampling, param in (
        ({"stop_token_ids": [99999]}, "sampling_params.stop_token_ids"),
        ({"logit_bias": {"99999": 1}}, "sampling_params.logit_bias"),
        ({"max_new_tokens": 99999}, "sampling_params.max_new_tokens"),
    ):
        response = await running.http.post("/generate", json={"input_ids": [5], "sampling_params": sampling})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    overflow = ContextOverflow("Too much.", param="max_new_tokens")
    assert completions.ERROR_FORMAT.failure(overflow).param == "max_tokens"


async def test_failed_step_is_told_without_its_secret(running: Running) -> None:
    running.runner.poison.add("bad")  # it also fails alone
    response = await running.http.post("/generate", json={"input_ids": [5], "rid": "bad"})
    assert response.status_code == 500
    assert "secret" not in response.text
    assert (await running.http.post("/generate", json={"input_ids": [5]})).status_code == 200


async def test_draining_engine_refuses_and_says_so(running: Running) -> None:
    await running.core.drain()
    assert (await running.http.get("/health")).status_code == 503
    response = await running.http.post("/generate", json={"input_ids": [5]})
    assert (response.status_code, response.json()["message"]) == (503, "The engine is draining.")


async def test_two_running_requests_have_different_names(running: Running) -> None:
    long = {"input_ids": [5] * 9, "rid": "a", "sampling_params": {"max_new_tokens": 300, "ignore_eos": True}}
    async with running.http.stream("POST", "/generate", json={**long, "stream": True}) as response:
        await anext(response.aiter_lines())
        second = await running.http.post("/generate", json=long)
        assert (second.status_code, second.json()["error"]["param"]) == (400, "rid")
        assert (await running.http.post("/generate", json={**long, "rid": "b"})).status_code == 200
    await until(lambda: all_pages_back(running.core))
    assert (await running.http.post("/generate", json=long)).status_code == 200
