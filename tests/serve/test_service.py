"""Time limits, service tiers and pinned prompts of requests, through the HTTP API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx
import pytest

from greedy import model_path
from runtime.config import Args
from runtime.errors import ConfigurationError
from serve import Engine
from serve.server.app import build_app

SMALL: dict[str, Any] = {"skip_tokenizer_init": True, "random_seed": 1, "page_size": 4}


@asynccontextmanager
async def served(path: str | None = None, **options: Any) -> AsyncIterator[tuple[Engine, httpx.AsyncClient]]:
    async with Engine(path, **options) as engine:
        transport = httpx.ASGITransport(app=build_app(engine.core), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
            yield engine, client


async def idle(engine: Engine) -> None:
    """Wait until nothing runs, then check all pages."""
    with anyio.fail_after(60):
        while engine.status().num_running or engine.status().num_requests:
            await anyio.sleep(0.01)
    engine.core.check()


LONG = {"ignore_eos": True, "max_new_tokens": 900, "temperature": 0}


async def test_a_request_ends_at_its_time_limit():
    async with served() as (engine, client):
        body: dict[str, Any] = {"input_ids": [5, 6, 7], "sampling_params": LONG, "timeout_s": 0.02}
        answer = await client.post("/generate", json=body)
        assert answer.status_code == 408
        assert answer.json()["error"]["param"] == "timeout_s"
        assert "within 0.02 s" in answer.json()["error"]["message"]
        chat = {"messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True, "max_tokens": 900}
        answer = await client.post("/v1/chat/completions", json={**chat, "timeout_s": 0.02, "stream": True})
        assert "0.02 s" in answer.text  # ended, or refused on a busy machine, where the first token would be late
        answer = await client.post("/v1/chat/completions", json={**chat, "max_tokens": 2, "timeout_s": 60})
        assert answer.status_code == 200
        for wrong in (0, -1, 1e9, "soon"):
            answer = await client.post("/v1/completions", json={"prompt": "a", "timeout_s": wrong})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "timeout_s")
        await idle(engine)


async def test_a_request_is_refused_if_its_first_token_would_be_late():
    async with served(max_predicted_first_token=30.0) as (engine, client):
        ask = {"input_ids": list(range(5, 45)), "sampling_params": {"max_new_tokens": 2}}
        assert (await client.post("/generate", json={**ask, "timeout_s": 60})).status_code == 200
        [actor] = engine.core.schedulers
        times = actor.progress.times
        times._prompt_s, times._num_prompt = 2048, 4096  # a slow machine: 40 tokens take 20 s
        ask["input_ids"] = list(range(50, 90))
        predicted_s = actor.first_token_s(40)
        assert predicted_s is not None
        assert 20 <= predicted_s < 30
        answer = await client.post("/generate", json={**ask, "timeout_s": 5})
        assert answer.status_code == 408
        assert "is predicted in" in answer.json()["error"]["message"]
        answer = await client.post("/generate", json={**ask, "input_ids": ask["input_ids"] * 2})
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 10
        assert (await client.get("/v1/loads")).json()["loads"][0]["predicted_first_token_s"] >= 0.5
        assert (await client.post("/generate", json=ask)).status_code == 200  # within the server's limit
        await idle(engine)


async def test_tiers_stand_for_priorities():
    tiers = {"priority": 100, "default": 0, "flex": -100}
    options = {"enable_priority_scheduling": True, "service_tier_priorities": tiers, "max_running_requests": 1}
    async with served(model_path("llama"), **SMALL, **options) as (engine, client):
        order: list[str] = []

        async def ask(name: str, **fields: Any) -> None:
            body = {"input_ids": [3, 4, 5], "sampling_params": {"max_new_tokens": 8, "ignore_eos": True}, **fields}
            answer = await client.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            order.append(name)

        [actor] = engine.core.schedulers
        async with anyio.create_task_group() as tasks, actor.paused():
            tasks.start_soon(lambda: ask("low", priority=-200))
            tasks.start_soon(lambda: ask("flex", service_tier="flex"))
            tasks.start_soon(lambda: ask("none"))
            tasks.start_soon(lambda: ask("priority", service_tier="priority"))
            tasks.start_soon(lambda: ask("urgent", priority=200, service_tier="flex"))
            with anyio.fail_after(30):
                while actor.scheduler.num_waiting < 5:
                    await anyio.sleep(0.01)
        assert order == ["urgent", "priority", "none", "flex", "low"]


def test_tiers_need_priorities():
    with pytest.raises(ConfigurationError, match="needs --enable-priority-scheduling"):
        resolved(service_tier_priorities={"flex": -1})
    with pytest.raises(ConfigurationError, match="'flex' must be a whole number"):
        resolved(service_tier_priorities={"flex": "low"}, enable_priority_scheduling=True)


def resolved(**options: Any) -> Any:
    from ops.machine import Machine
    from runtime.config.resolve import resolve
    from small_facts import FACTS

    return resolve(Args.of(model_path="/models/small", **options), Machine.named("cpu"), FACTS)


async def cached(client: httpx.AsyncClient, ids: list[int], **fields: Any) -> int:
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 2, "ignore_eos": True}, **fields}
    answer = await client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["meta_info"]["cached_tokens"]


@pytest.mark.parametrize(("fields", "share"), [({"prompt_cache_key": "k"}, 0.5), ({"session_id": "s"}, 0.5), ({}, 0.5)])
async def test_a_pinned_prompt_outlives_others(fields: dict[str, Any], share: float):
    async with served(model_path("llama"), **SMALL, max_total_tokens=160, prefix_pin_share=share) as (engine, client):
        mine, pages = [7] * 41, 40
        await cached(client, mine, **fields)
        for number in range(12):
            await cached(client, [10 + number] * 41)
        if fields:
            assert (await client.get("/v1/loads")).json()["loads"][0]["num_pinned_tokens"] == pages
        assert await cached(client, mine, **fields) == (pages if fields else 0)
        await cached(client, [9] * 150)  # one request needs nearly all pages: pins delay nobody
        assert engine.status().num_running == 0
        engine.core.check()


async def test_the_client_with_most_pins_loses_its_oldest():
    async with served(model_path("llama"), **SMALL, max_total_tokens=400, prefix_pin_share=0.25) as (engine, client):
        for number in range(6):
            await cached(client, [10 + number] * 41, prompt_cache_key=str(number))
        [actor] = engine.core.schedulers
        assert actor.scheduler.load.num_pinned_pages == 20  # two prompts of ten pages; the budget is 25
        await cached(client, [10] * 81, prompt_cache_key="5")  # a longer prompt takes the place of its key's pin
        assert actor.scheduler.load.num_pinned_pages == 20
        await cached(client, [60] * 121, prompt_cache_key="large")  # exceeds the budget: not pinned
        assert actor.scheduler.load.num_pinned_pages == 20
        await idle(engine)
        assert engine.flush_cache()
        assert actor.scheduler.load.num_pinned_pages == 0
        engine.core.check()


async def test_cache_control_pins():
    async with served() as (engine, client):
        [actor] = engine.core.schedulers
        body = {
            "model": "penstock-demo",
            "max_tokens": 2,
            "messages": [{"role": "user", "content": "Tell me more. " * 9}],
        }
        assert (await client.post("/v1/messages", json=body)).status_code == 200
        assert actor.scheduler.load.num_pinned_pages == 0
        system = [{"type": "text", "text": "You are a fox. " * 9, "cache_control": {"type": "ephemeral"}}]
        assert (await client.post("/v1/messages", json={**body, "system": system})).status_code == 200
        first = actor.scheduler.load.num_pinned_pages
        assert first > 0
        longer = [*body["messages"], {"role": "assistant", "content": "No."}, {"role": "user", "content": "Why? " * 20}]
        answer = await client.post("/v1/messages", json={**body, "system": system, "messages": longer})
        assert answer.status_code == 200
        second = actor.scheduler.load.num_pinned_pages
        assert first < second < 2 * first + 12  # the longer prompt has replaced the shorter one
        part = {"type": "text", "text": "Once upon a time. " * 9, "cache_control": {"type": "ephemeral"}}
        chat = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
        assert (await client.post("/v1/chat/completions", json=chat)).status_code == 200
        assert actor.scheduler.load.num_pinned_pages > second
