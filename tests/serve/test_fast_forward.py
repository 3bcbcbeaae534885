"""Forced tokens that are appended, against the same tokens sampled: with `--disable-jump-forward`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from bench.fast_forward import SCHEMAS
from serve import Engine

OFF = {"disable_jump_forward": True}
WAYS: dict[str, dict[str, Any]] = {
    "page size 1": {"page_size": 1},
    "no overlap": {"disable_overlap_schedule": True},
    "chunks of 16": {"page_size": 16, "chunked_prefill_size": 16},
    "no prefix cache": {"disable_radix_cache": True},
    "not mixed": {"enable_mixed_chunk": False},
    "three at a time": {"max_running_requests": 3},
    "retracted": {"max_total_tokens": 1024, "page_size": 16, "schedule_conservativeness": 0.0},
    "two ranks": {"tp_size": 2},
    "two stages": {"pp_size": 2},
}
LOWEST = -1e30  # log-probabilities below belong to tokens that are not allowed


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[Engine]:
    async with Engine(random_seed=1, **options) as engine:
        yield engine
        status = engine.status()
        assert (status.num_running, status.num_waiting, status.num_used_pages) == (0, 0, 0)
        assert bool(status.num_forced) != ("disable_jump_forward" in options)
        engine.core.check()


def requests(number: int = 40) -> list[dict[str, Any]]:
    """Keyword arguments of `generate`: each with another schema, in all the ways in which an output may be asked."""
    found = []
    for index in range(number):
        schema = SCHEMAS[index % len(SCHEMAS)]
        if index >= len(SCHEMAS):  # other names and limits
            schema = json.loads(json.dumps(schema).replace("name", f"name_{index}").replace("12", str(index)))
        sampling: dict[str, Any] = {
            "json_schema": schema,
            "temperature": float(index % 3 > 0),
            "seed": index,
            "max_new_tokens": (80, 3, 17, 60)[index % 4],
            **({}, {"frequency_penalty": 0.5, "repetition_penalty": 1.2}, {"n": 2}, {"min_new_tokens": 3})[
                index // 2 % 4
            ],
            **({}, {"stop": ["ame", 'a":']}, {"ignore_eos": True})[index % 3],
        }
        wanted = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [5, 90]}
        found.append(
            {"prompt": f"{index}: an object", "sampling_params": sampling, **(wanted if index % 5 else {})}
        )
    return found


async def answers(engine: Engine, asked: list[dict[str, Any]]) -> list[Any]:
    return [plain(each) for each in await asyncio.gather(*(engine.generate(**each) for each in asked))]


def plain(answer: Any) -> Any:
    """What must not depend on how tokens came."""
    if isinstance(answer, list):
        return [plain(each) for each in answer]
    meta = answer["meta_info"]
    logprobs = [meta.get(f"output_{kind}_logprobs") for kind in ("token", "top", "token_ids")]
    kept = [_allowed(position) for kind in logprobs if kind for position in kind]
    return answer["text"], answer["output_ids"], meta["finish_reason"], meta["completion_tokens"], kept


def _allowed(position: Any) -> list[tuple[Any, int]]:
    """Of one token or several: which of the tokens that are not allowed is named does not matter."""
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
