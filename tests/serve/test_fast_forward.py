"""Appended forced tokens, against sampling the same tokens with `--disable-jump-forward`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import jsonschema
import openai
import pytest

import http_server
from bench.fast_forward import SCHEMAS
from random_schemas import SchemaWriter
from runtime.errors import EngineFailure, InvalidRequest
from runtime.scheduler import fast_forward
from serve import Engine
from serve.server.app import build_app

OFF = {"disable_jump_forward": True}
WAYS: dict[str, dict[str, Any]] = {
    "page size 1": {"page_size": 1},
    "no overlap": {"disable_overlap_schedule": True},
    "chunks of 16": {"page_size": 16, "chunked_prefill_size": 16},
    "no prefix cache": {"disable_radix_cache": True},
    "not mixed": {"enable_mixed_chunk": False},
    "three at a time": {"max_running_requests": 3},
    "retracted": {"max_total_tokens": 384, "page_size": 16, "schedule_conservativeness": 0.0},
    "two ranks": {"tp_size": 2},
    "two stages": {"pp_size": 2},
}
LOWEST = -1e30  # lower log-probabilities belong to forbidden tokens


@pytest.fixture(autouse=True)
def always_appended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced tokens are always appended, even if sampling them would be faster, as with this small model."""
    monkeypatch.setattr(fast_forward, "MIN_ROW_S", 0.0)


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Engine]:
    async with Engine(random_seed=1, **options) as engine:
        yield engine
        status = engine.status()
        assert (status.num_running, status.num_waiting, status.num_used_pages) == (0, 0, 0)
        assert bool(status.num_forced) != ("disable_jump_forward" in options)
        engine.core.check()


def requests(number: int = 40) -> list[dict[str, Any]]:
    """Return keyword arguments of `generate`, with different schemas and all kinds of output options."""
    found = []
    for index in range(number):
        schema = SCHEMAS[index % len(SCHEMAS)]
        if index >= len(SCHEMAS):  # the same schemas with other names and limits
            schema = json.loads(json.dumps(schema).replace("name", f"name_{index}").replace("12", str(index)))
        sampling: dict[str, Any] = {
            "json_schema": schema,
            "temperature": float(index % 3 > 0),
            "seed": index,
            "max_new_tokens": (80, 3, 17, 60)[index % 4],
            **({}, {"frequency_penalty": 2.0, "repetition_penalty": 1.8}, {"n": 2}, {"min_new_tokens": 3})[
                index // 2 % 4
            ],
            **({}, {"stop": ["ame", 'a":']}, {"ignore_eos": True})[index % 3],
        }
        if index % 10 == 9:  # a stop string within forced text
            del sampling["json_schema"]
            sampling |= {"regex": "A(BC(DE(FG(HI)?)?)?)?", "min_new_tokens": index // 10, "max_new_tokens": 9}
        if index % 10 == 3:  # forced tokens make the next choice less likely
            del sampling["json_schema"]
            sampling |= {
                "regex": "It is yes or no, say: yes, (yes|no|maybe|it is)!",
                "frequency_penalty": 2.0,
            }
            sampling["max_new_tokens"] = 40
        wanted = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [5, 90]}
        found.append({"prompt": f"{index}: an object", "sampling_params": sampling, **(wanted if index % 5 else {})})
    return found


async def answers(engine: Engine, asked: list[dict[str, Any]]) -> list[Any]:
    return [plain(each) for each in await asyncio.gather(*(engine.generate(**each) for each in asked))]


def plain(answer: Any) -> Any:
    """Return the part of an answer that must not depend on how its tokens were generated."""
    if isinstance(answer, list):
        return [plain(each) for each in answer]
    meta = answer["meta_info"]
    logprobs = [meta.get(f"output_{kind}_logprobs") for kind in ("token", "top", "token_ids")]
    kept = [_allowed(position) for kind in logprobs if kind for position in kind]
    return answer["text"], answer["output_ids"], meta["finish_reason"], meta["completion_tokens"], kept


def _allowed(position: Any) -> list[tuple[Any, int]]:
    """Remove forbidden tokens from one or several logprobs, because it does not matter which of them are listed."""
    pairs = position if isinstance(position[0], list | tuple) else [position]
    return [(pytest.approx(pair[0], abs=1e-3), pair[1]) for pair in pairs if pair[0] > LOWEST]


_expected: list[Any] = []


async def expected() -> list[Any]:
    if not _expected:
        async with running(**OFF) as engine:
            _expected.extend(await answers(engine, requests()))
    return _expected


async def test_forty_schemas_give_what_they_give_when_every_token_is_sampled() -> None:
    wanted = await expected()
    async with running() as engine:
        found = await answers(engine, requests())
    for each, other, asked in zip(found, wanted, requests(), strict=True):
        assert each == other, asked
    reasons = [each[2]["type"] for each in found if not isinstance(each, list)]
    assert {"stop", "length"} == set(reasons)
    assert any(isinstance(each[2].get("matched"), str) for each in found if not isinstance(each, list))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
async def test_the_same_however_the_work_is_cut(way: str) -> None:
    wanted = await expected()
    if way == "two ranks":  # sums are rounded differently
        async with running(**OFF, **WAYS[way]) as engine:
            wanted = await answers(engine, requests())
    async with running(**WAYS[way]) as engine:
        assert await answers(engine, requests()) == wanted
        assert way != "retracted" or engine.status().num_retracted > 0


@pytest.mark.slow
async def test_the_same_over_http_in_one_call_and_streamed() -> None:
    """Forty schemas in one call; eight of them as a stream of OpenAI's client, where every chunk adds text."""
    asked = [each["sampling_params"] for each in requests() if each["sampling_params"].get("n", 1) == 1]
    found = []
    for options in (OFF, {}):
        async with (
            running(**options) as engine,
            http_server.serving(build_app(engine.core)) as url,
            httpx.AsyncClient(base_url=url, timeout=120) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            body = {"text": ["An object:"] * len(asked), "sampling_params": asked}
            answer = await http.post("/generate", json=body)
            found.append([plain(each) for each in answer.raise_for_status().json()])
            found.append([await streamed(client, number) for number in range(8)])
    assert found[:2] == found[2:]
    assert len(asked) >= 30


async def streamed(client: openai.AsyncOpenAI, number: int) -> tuple[str, list[tuple[str, float]], Any, int]:
    """Return the text, tokens with log-probabilities, finish reason and token counts of a stream."""
    schema: Any = {"name": "object", "schema": SCHEMAS[number], "strict": True}
    stream = await client.chat.completions.create(
        model="penstock-demo",
        messages=[{"role": "user", "content": "Some JSON."}],
        max_tokens=60,
        temperature=1,
        seed=number,
        response_format={"type": "json_schema", "json_schema": schema},
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
    )
    text, tokens, reason, count = "", [], None, 0
    async for chunk in stream:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            if choice.logprobs is not None and choice.logprobs.content is not None:
                tokens += [(each.token, round(each.logprob, 3)) for each in choice.logprobs.content]
        count = chunk.usage.completion_tokens if chunk.usage else count
    assert len(tokens) == count
    return text, tokens, reason, count


@pytest.mark.slow
async def test_random_schemas_give_the_same_and_what_ended_is_valid() -> None:
    schemas = [SchemaWriter(seed).schema() for seed in range(500, 564)]

    async def ask(engine: Engine, seed: int, schema: Any) -> Any:
        sampling = {"json_schema": schema, "temperature": 1, "seed": seed, "max_new_tokens": 70}
        try:
            return plain(await engine.generate("Some JSON:", {**sampling, "n": 1 + seed % 2}))
        except (InvalidRequest, EngineFailure) as error:
            return str(error)

    found = []
    for options in (OFF, {}):
        async with running(**options) as engine:
            found.append(await asyncio.gather(*(ask(engine, *each) for each in enumerate(schemas))))
    assert found[0] == found[1]
    ended = 0
    for answer, schema in zip(found[1], schemas, strict=True):
        for each in answer if isinstance(answer, list) else [answer]:
            if not isinstance(each, str) and each[2]["type"] == "stop":
                ended += 1
                jsonschema.validate(json.loads(each[0]), schema, jsonschema.Draft202012Validator)
    assert ended > 20
