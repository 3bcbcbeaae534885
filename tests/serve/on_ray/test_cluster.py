"""Two replicas of the demo model under a real Ray, through the openai client."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# (Ray is an extra.)

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest

ray = pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray's own code
]
NUM_REQUESTS, CANCELLED = 500, 0.2
PREFIXES = [f"Topic {number}. " + "Explain the options of a server. " * 12 for number in range(8)]


class Cluster:
    """A Ray cluster of this machine with the demo model. `deploy` starts it, or changes it while it serves."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def deploy(self, **args: Any) -> None:
        from ray import serve

        from serve.on_ray import build_app

        serve.run(build_app({"random_seed": 1, "skip_server_warmup": True, **args}), name="penstock")

    def replicas(self) -> list[int]:
        """The process ids of the running engines."""
        title = "ray::ServeReplica:penstock:engine"
        return [each.pid for each in psutil.process_iter(["cmdline"]) if title in " ".join(each.info["cmdline"] or ())]

    async def wait_for(self, number: int) -> None:
        """Wait until this number of engines runs."""
        while len(await asyncio.to_thread(self.replicas)) != number:
            await asyncio.sleep(0.2)

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    from ray import serve

    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    made = Cluster()
    serve.start(http_options={"host": "127.0.0.1", "port": made.port})
    try:
        made.deploy(replicas=2)
        yield made
    finally:
        serve.shutdown()
        ray.shutdown()


async def stream(client: openai.AsyncOpenAI, prompt: str, tokens: int, stop_after: int | None = None) -> str:
    """Return the text of a streamed completion. The caller leaves after `stop_after` events."""
    text, count = "", 0
    events = await client.completions.create(
        model="penstock-demo", prompt=prompt, max_tokens=tokens, temperature=0, stream=True, extra_body=EXTRA
    )
    async for event in events:
        text += event.choices[0].text if event.choices else ""
        count += 1
        if count == stop_after:
            await events.close()
            break
    return text


EXTRA = {"ignore_eos": True}


async def test_streams_are_those_of_a_plain_engine(cluster: Cluster) -> None:
    from serve import Engine

    async with Engine(random_seed=1) as engine, cluster.client() as client:
        for prompt in PREFIXES[:3]:
            answer = await engine.generate(prompt, {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True})
            assert await stream(client, prompt, 24) == answer["text"]
        refused = await httpx.AsyncClient().post(f"{cluster.url}/v1/completions", json={"prompt": 3})
        assert refused.status_code == 400
        assert "prompt" in refused.json()["error"]["message"]


def load(seed: int) -> list[tuple[str, bool]]:
    """Prompts with shared prefixes, and whether the caller leaves early."""
    chosen = random.Random(seed)
    return [
        (f"{chosen.choice(PREFIXES)} Question {number}?", chosen.random() < CANCELLED) for number in range(NUM_REQUESTS)
    ]


async def run_load(client: openai.AsyncOpenAI, at_once: int = 8) -> float:
    """Send the load; return the share of the prompt tokens that were cached, of the requests that ended."""
    cached = prompts = 0
    limit = asyncio.Semaphore(at_once)

    async def one(prompt: str, leaves: bool) -> None:
        nonlocal cached, prompts
        async with limit:
            if leaves:
                await stream(client, prompt, 64, stop_after=2)
                return
            answer = await client.completions.create(
                model="penstock-demo", prompt=prompt, max_tokens=2, temperature=0, extra_body=EXTRA
            )
            usage = answer.usage
            assert usage is not None
            prompts += usage.prompt_tokens
            cached += (usage.prompt_tokens_details.cached_tokens or 0) if usage.prompt_tokens_details else 0

    await asyncio.gather(*(one(prompt, leaves) for prompt, leaves in load(3)))
    return cached / prompts


async def test_shared_prefixes_stay_cached_with_two_replicas(cluster: Cluster) -> None:
    """The share of cached tokens is at least 90 % of that of a single engine."""
    cluster.deploy(replicas=1, enable_cache_report=True)
    await cluster.wait_for(1)
    async with cluster.client() as client:
        alone = await run_load(client)
    cluster.deploy(replicas=2, enable_cache_report=True)
    await cluster.wait_for(2)
    async with cluster.client() as client:
        together = await run_load(client)
    assert alone > 0.5
    assert together >= 0.9 * alone


async def test_a_killed_replica_costs_only_its_own_streams(cluster: Cluster) -> None:
    cluster.deploy(replicas=2)
    await cluster.wait_for(2)
    failed = ended = 0

    async def one(number: int) -> None:
        nonlocal failed, ended
        try:
            text = await stream(client, f"Story {number}.", 400)
            assert text
            ended += 1
        except openai.APIError as error:
            assert "replica" in str(error).lower()
            failed += 1

    async with cluster.client() as client:
        streams = [asyncio.create_task(one(number)) for number in range(24)]
        await asyncio.sleep(0)
        while not any(task.done() for task in streams):
            await asyncio.sleep(0.05)
        victim = (await asyncio.to_thread(cluster.replicas))[0]
        os.kill(victim, signal.SIGKILL)
        await asyncio.gather(*streams)
        assert ended > 0
        assert await stream(client, "After the end of a replica", 8)
        await cluster.wait_for(2)  # Ray Serve starts another one


async def test_scaling_cuts_no_stream(cluster: Cluster) -> None:
    cluster.deploy(replicas=1)
    await cluster.wait_for(1)
    lengths: list[int] = []
    going = True

    async def one(number: int) -> None:
        while going:
            text = await stream(client, f"Tale {number} at {time.monotonic()}.", 100)
            lengths.append(len(text))

    async with cluster.client() as client:
        streams = [asyncio.create_task(one(number)) for number in range(6)]
        deploy: Callable[..., None] = cluster.deploy
        for replicas in (2, 1):
            await asyncio.to_thread(deploy, replicas=replicas)
            await cluster.wait_for(replicas)
        await asyncio.to_thread(deploy, replicas=1, random_seed=2)  # a rolling update
        going = False
        await asyncio.gather(*streams)  # raises what a stream raised
    assert lengths
