"""SGLang's own router in front of Penstock's servers: the address, the protocol and the policies are the router's."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from socket import socket
from typing import Any

import httpx
import openai
import pytest

from server_process import Server, serving

pytest.importorskip("sglang_router", reason="needs the package sglang-router")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

OPTIONS = ("--random-seed", "1", "--skip-server-warmup", "--max-total-tokens", "4096", "--page-size", "16")
PROMPTS = [f"Topic {number}. " + "Explain the options of a server. " * 8 for number in range(6)]
# Worker health is checked every second; a failed check removes a worker.
HEALTH = ("--health-check-interval-secs", "1", "--health-check-timeout-secs", "5", "--health-failure-threshold", "1")


def free_port() -> int:
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def servers(*options: tuple[str, ...]) -> Iterator[list[Server]]:
    """One server process for each tuple of options."""
    with ExitStack() as stack:
        yield [stack.enter_context(serving(*OPTIONS, *each)) for each in options]


@asynccontextmanager
async def router(*options: str) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a running router."""
    port, metrics = free_port(), free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(metrics), "--log-level", "warn", *HEALTH, *options]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
            await ready(client, process)
            yield client
    finally:
        process.kill()
        process.wait()


async def ready(client: httpx.AsyncClient, process: subprocess.Popen[Any]) -> None:
    """Wait until the router answers, and has its workers."""
    while process.poll() is None:
        try:
            if (await client.get("/readiness")).status_code == 200:
                return
        except httpx.TransportError:
            pass
        await asyncio.sleep(0.2)
    raise AssertionError("the router ended")


async def answered(client: httpx.AsyncClient, prompt: str) -> dict[str, Any]:
    """The answer of /generate."""
    sampling = {"max_new_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = await client.post("/generate", json={"text": prompt, "sampling_params": sampling})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def generated(client: httpx.AsyncClient | str, prompt: str) -> str:
    """The text of /generate, from the router or from the server at this address."""
    if isinstance(client, str):
        async with httpx.AsyncClient(base_url=client, timeout=60, trust_env=False) as server:
            return (await answered(server, prompt))["text"]
    return (await answered(client, prompt))["text"]


async def streamed(url: Any, prompt: str, tokens: int = 16) -> str:
    """The text of a streamed completion, by the openai client."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        events = await client.completions.create(
            model="penstock-demo",
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return "".join([event.choices[0].text async for event in events if event.choices])


async def workers(client: httpx.AsyncClient) -> dict[str, Any]:
    """The router's workers, by address."""
    answer = await client.get("/workers")
    assert answer.status_code == 200, answer.text
    return {each["url"]: each for each in answer.json()["workers"]}


def num_healthy(known: dict[str, Any]) -> int:
    return sum(each["is_healthy"] for each in known.values())


async def test_servers_are_workers_of_the_router() -> None:
    with servers((), ()) as (first, second):
        reference = [await generated(first.url, prompt) for prompt in PROMPTS]
        async with router("--worker-urls", first.url, "--policy", "round_robin") as client:
            # A worker that is registered later takes part of the load.
            added = await client.post("/workers", json={"url": second.url})
            assert added.status_code in (200, 202), added.text
            while num_healthy(known := await workers(client)) < 2:
                await asyncio.sleep(0.1)
            assert known.keys() == {first.url, second.url}
            assert known[second.url]["model_id"]  # as /server_info or /get_model_info of the worker tells
            assert [await generated(client, prompt) for prompt in PROMPTS] == reference
            assert [await streamed(client.base_url, prompt) for prompt in PROMPTS] == reference
            chat = await client.post(
                "/v1/chat/completions",
                json={"model": "penstock-demo", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4},
            )
            assert chat.status_code == 200, chat.text
            refused = await client.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": -2}})
            assert 400 <= refused.status_code < 500
            for url in (first.url, second.url):
                async with httpx.AsyncClient(base_url=url, trust_env=False) as server:
                    assert (await server.get("/get_server_info")).json()["internal_states"][0]["num_generated"] > 0

            # A worker dies under load: its own streams end with an error, and no other request is lost.
            streams = [asyncio.create_task(streamed(client.base_url, f"Story {n}.", 200)) for n in range(8)]
            while not any(task.done() for task in streams):
                await asyncio.sleep(0.02)
            os.kill(second.process.pid, signal.SIGKILL)
            ended = await asyncio.gather(*streams, return_exceptions=True)
            assert any(isinstance(each, str) for each in ended)
            assert [await generated(client, prompt) for prompt in PROMPTS] == reference


async def test_prefill_and_decode_servers_are_workers_of_the_router() -> None:
    bootstrap = str(free_port())
    prefill = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", bootstrap, "--hicache-ratio", "2")
    decode = ("--disaggregation-mode", "decode", "--disaggregation-prefill", f"127.0.0.1:{bootstrap}",
              "--hicache-ratio", "2")  # fmt: skip
    with servers((), prefill, decode) as (plain, first, second):
        reference = [await generated(plain.url, prompt) for prompt in PROMPTS]
        async with router("--pd-disaggregation", "--prefill", first.url, bootstrap, "--decode", second.url) as client:
            answers = [await answered(client, prompt) for prompt in PROMPTS]
            assert [answer["text"] for answer in answers] == reference
            # The decode server has never seen these prompts: their pages came from the prefill server.
            assert all(answer["meta_info"]["cached_tokens"] > 0 for answer in answers)
            assert [await streamed(client.base_url, prompt) for prompt in PROMPTS] == reference
