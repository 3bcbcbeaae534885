"""A session with every kind of request against a served engine, and checks for forbidden waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import httpx

import http_server
from serve import Engine
from serve.server.app import build_app

# Small enough to cause chunks, retractions and evictions.
OPTIONS: dict[str, Any] = {
    "page_size": 16,
    "chunked_prefill_size": 64,
    "max_total_tokens": 768,
    "max_running_requests": 12,
    "schedule_conservativeness": 0.0,
    "random_seed": 1,
}
LONG = [3 + place % 90 for place in range(300)]
SAMPLED = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02}
PENALISED = {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.2}
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    SAMPLED,
    {"temperature": 1.3},
    {**SAMPLED, "n": 3},
    {"temperature": 0.7, "top_p": 0.5},
    {**PENALISED, "temperature": 0},
    {**PENALISED, **SAMPLED},
    {"temperature": 0, "logit_bias": {"7": 5.0, "9": -100}},
)
LOGPROBS = {
    "return_logprob": True,
    "top_logprobs_num": 5,
    "token_ids_logprob": [4, 9],
    "logprob_start_len": 0,
}


@contextmanager
def no_waiting(device: str) -> Iterator[None]:
    """Inside this context, torch raises in every thread if anything except an event makes the host wait for a GPU.

    The thread that reads results may wait for the event after a step.
    """
    if not device.startswith("cuda"):
        yield
        return
    import torch

    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


async def run(engine: Engine) -> None:
    """Send all kinds of requests over HTTP and from Python, many at once. Raises AssertionError for a failure."""
    async with (
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=120) as client,
        anyio.create_task_group() as together,
    ):
        for number, sampling in enumerate(SAMPLINGS):
            together.start_soon(_generate, client, LONG[number : 40 + 9 * number], sampling)
            together.start_soon(_generate, client, LONG[: 200 + number], sampling)  # a shared prefix
            together.start_soon(_generate, client, LONG[number : number + 70], sampling, LOGPROBS)
        together.start_soon(_complete, client, engine.core.plan.serve.served_model_name)
        together.start_soon(_leave, engine)
    assert engine.status().num_requests == 0


async def _generate(
    client: httpx.AsyncClient, ids: list[int], sampling: dict[str, Any], more: dict[str, Any] | None = None
) -> None:
    wanted = {"max_new_tokens": 24, "ignore_eos": True, **sampling}
    body = {"input_ids": ids, "sampling_params": wanted, **(more or {})}
    response = await client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    found = response.json()
    for answer in found if isinstance(found, list) else [found]:
        assert len(answer["output_ids"]) == 24
        if more:
            assert len(answer["meta_info"]["input_token_logprobs"]) == len(ids)
            assert len(answer["meta_info"]["output_token_logprobs"]) == 24


async def _complete(client: httpx.AsyncClient, model: str) -> None:
    """Stream a completion of a text prompt up to a stop string."""
    body = {"model": model, "prompt": "Once upon a time", "max_tokens": 40, "stream": True, "stop": ["zzz"]}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        lines = [line async for line in response.aiter_lines()]
    assert response.status_code == 200, lines
    assert "data: [DONE]" in lines


async def _leave(engine: Engine) -> None:
    """Cancel streams early, and check that their pages are freed."""
    for _ in range(4):
        sampling = {"max_new_tokens": 400, "ignore_eos": True}
        pieces = engine.stream(input_ids=LONG[:150], sampling_params=sampling)
        async for _ in pieces:
            break
        await pieces.aclose()
