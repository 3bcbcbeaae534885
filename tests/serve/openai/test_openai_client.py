"""The official client against the real engine over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

import http_server
import tiny_models
from serve import Engine
from serve.server.app import build_app

MESSAGES = [{"role": "user", "content": "Once upon a time"}]


@asynccontextmanager
async def connected(**options: Any) -> AsyncIterator[tuple[Any, Engine]]:
    options = {"served_model_name": "tiny", "enable_cache_report": True, **options}
    async with (
        Engine(tiny_models.cached(), **options) as engine,
        http_server.serving(build_app(engine.core)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client, engine


async def test_chat_streamed_is_chat_whole():
    async with connected() as (client, _):
        ask = {"model": "tiny", "messages": MESSAGES, "max_tokens": 40, "temperature": 0.8, "seed": 3}
        whole = await client.chat.completions.create(**ask)
        stream = await client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
        assert finishes[-1] == whole.choices[0].finish_reason


async def test_four_choices_of_a_long_prompt_compute_it_once():
    async with connected() as (client, engine):
        prompt = [3 + place % 100 for place in range(1000)]
        answer = await client.completions.create(
            model="tiny", prompt=prompt, n=4, max_tokens=6, temperature=1.0, seed=1
        )
        assert len(answer.choices) == 4
        assert answer.usage.prompt_tokens == 1000
        assert answer.usage.completion_tokens == sum(len(ids) for ids in await output_ids(engine, prompt, n=4, seed=1))
        again = await client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
        assert again.usage.prompt_tokens_details.cached_tokens == 992


async def output_ids(engine: Engine, prompt: list[int], *, n: int, seed: int) -> list[list[int]]:
    sampling = {"n": n, "max_new_tokens": 6, "temperature": 1.0, "seed": seed}
    return [a["output_ids"] for a in await engine.generate(input_ids=prompt, sampling_params=sampling)]


async def test_logprobs_of_chat_and_echoed_completion():
    async with connected() as (client, engine):
        chat = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3
        )
        for entry in chat.choices[0].logprobs.content:
            assert len(entry.top_logprobs) == 3
            assert entry.logprob == max(top.logprob for top in entry.top_logprobs)  # the output is greedy
        prompt = "Once upon a time"
        echo = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=3, temperature=0, logprobs=1, echo=True
        )
        native = await engine.generate(
            prompt, {"max_new_tokens": 3, "temperature": 0}, return_logprob=True, logprob_start_len=0
        )
        meta = native["meta_info"]
        expected = [e[0] for e in meta["input_token_logprobs"] + meta["output_token_logprobs"]]
        got = echo.choices[0].logprobs.token_logprobs
        assert got[0] is expected[0] is None
        assert got[1:] == pytest.approx(expected[1:], abs=1e-4)
        assert echo.choices[0].text.startswith(prompt)


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"model": "another"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_tokens": 10**7}, openai.BadRequestError, "max_tokens"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"n": 100000}, openai.BadRequestError, "n"),
    ],
)
async def test_mistakes_raise_the_clients_own_errors(change, error, param):
    async with connected() as (client, engine):
        with pytest.raises(error) as caught:
            await client.chat.completions.create(**{"model": "tiny", "messages": MESSAGES, **change})
        assert caught.value.param == param
        assert engine.status().num_requests == 0


async def test_client_that_leaves_a_stream_frees_its_pages():
    async with connected() as (client, engine):
        stream = await client.completions.create(
            model="tiny", prompt="Once", max_tokens=1800, stream=True, extra_body={"ignore_eos": True}
        )
        async for _ in stream:
            break
        assert engine.status().num_used_pages > 0
        await stream.close()
        while engine.status().num_requests:
            await asyncio.sleep(0)
        assert engine.status().num_used_pages == 0


async def test_prompts_with_different_salts_share_no_prefix():
    async with connected() as (client, engine):
        prompt = [3 + place % 100 for place in range(64)]

        async def cached(**fields: str) -> int:
            ask = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "extra_body": fields}
            details = (await client.completions.create(**ask)).usage.prompt_tokens_details
            return details.cached_tokens if details else 0

        assert [await cached(), await cached()] == [0, 48]
        assert [await cached(cache_salt="a"), await cached(cache_salt="a")] == [0, 48]
        assert await cached(cache_salt="b") == await cached(extra_key="a") == 0
        assert await cached(cache_salt="a", extra_key="b") == 0
        mixed = await engine.generate(
            input_ids=[prompt] * 2, sampling_params={"max_new_tokens": 1}, cache_salt=["b", "c"]
        )
        assert [each["meta_info"]["cached_tokens"] for each in mixed] == [48, 0]

        async def cached_of_chat(**fields: str) -> int:
            ask = {"model": "tiny", "messages": MESSAGES * 8, "max_tokens": 1, "extra_body": fields}
            details = (await client.chat.completions.create(**ask)).usage.prompt_tokens_details
            return details.cached_tokens if details else 0

        assert await cached_of_chat(cache_salt="a") == await cached_of_chat(cache_salt="b") == 0
        assert await cached_of_chat(cache_salt="b") > 0
        with pytest.raises(openai.BadRequestError, match="cache_salt"):
            await cached(cache_salt="")
