"""Two replicas of the demo model under a real Ray, through the openai client."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# (Ray is an extra.)

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from greedy import model_path, prompts
from lora_adapters import adapter
from lora_engine import PLAIN, expected
from ray_cluster import ray_serve

ray = pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of Ray's own code
]
NUM_REQUESTS, CANCELLED = 500, 0.2
PREFIXES = [f"Topic {number}. " + "Explain the options of a server. " * 12 for number in range(48)]
ADMIN = {"authorization": "Bearer admin"}


class Cluster:
    """A Ray cluster of this machine with the demo model. `deploy` starts it, or changes it while it serves."""

    def __init__(self, url: str) -> None:
        self.url = url

    def deploy(self, **args: Any) -> None:
        from ray import serve

        from serve.on_ray import build_app

        defaults = {"random_seed": 1, "skip_server_warmup": True, "enable_metrics": True, "admin_api_key": "admin"}
        serve.run(build_app({**defaults, **args}), name="penstock")

    def replicas(self) -> list[int]:
        """The process ids of the running engines."""
        title = "ray::ServeReplica:penstock:engine"
        return [each.pid for each in psutil.process_iter(["cmdline"]) if title in " ".join(each.info["cmdline"] or ())]

    async def wait_for(self, number: int) -> None:
        """Wait until this number of engines runs."""
        while len(await asyncio.to_thread(self.replicas)) != number:
            await asyncio.sleep(0.2)

    def http(self, **headers: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=120, headers=headers, trust_env=False)

    async def samples(self, metric: str) -> dict[str, float]:
        """The values of a metric, by replica. The replicas must have one sample of it each."""
        async with self.http() as client:
            text = (await client.get("/metrics")).text
        lines = [line for line in text.splitlines() if line.startswith(f"{metric}{{")]
        return {line.split('replica="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with ray_serve(num_cpus=2) as url:
        made = Cluster(url)
        made.deploy(replicas=2)
        yield made


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
    async with cluster.http() as http:
        refused = await http.post("/v1/completions", json={"prompt": 3})
        assert refused.status_code == 400
        assert "prompt" in refused.json()["error"]["message"]


async def test_sessions_stay_at_one_replica_and_routes_for_all_reach_all(cluster: Cluster) -> None:
    async with cluster.http() as http:

        async def replica(number: int, **fields: Any) -> str:
            body = {"prompt": f"{number} " * 300, "max_tokens": 1, **fields}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return answer.headers["x-replica"]

        assert len(set(await asyncio.gather(*map(replica, range(12))))) == 2
        for session in ("a", "b"):  # all at once, so that the load alone would spread them
            first = await replica(0, session_id=session)
            assert set(await asyncio.gather(*(replica(n, session_id=session) for n in range(12)))) == {first}

        assert len(await cluster.samples("sglang:num_running_reqs")) == 2
        assert (await http.post("/flush_cache")).status_code == 401
        assert (await http.post("/flush_cache", headers=ADMIN)).status_code == 200
        assert (await http.post("/update_weights_from_disk", json={}, headers=ADMIN)).status_code == 501

        # A request is aborted wherever it runs.
        sampling = {"max_new_tokens": 1900, "ignore_eos": True}
        for number in range(4):
            body = {"text": f"{number} " * 50, "rid": f"r{number}", "stream": True, "sampling_params": sampling}
            async with http.stream("POST", "/generate", json=body) as events:
                aborted, last = None, ""
                async for line in events.aiter_lines():
                    if aborted is None:
                        aborted = await http.post("/abort_request", json={"rid": f"r{number}"})
                        assert aborted.status_code == 200
                    last = line if line.startswith("data: {") else last
            assert json.loads(last.removeprefix("data: "))["meta_info"]["finish_reason"]["type"] == "abort"


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


async def test_shared_prefixes_stay_cached_with_two_replicas(
    cluster: Cluster, record_property: Callable[[str, object], None]
) -> None:
    """The share of cached tokens is at least 90 % of that of a single engine, and higher than with round robin.

    A fifth of the 500 requests is cancelled; afterwards nothing runs in a replica.
    """
    shares: dict[str, float] = {}
    for name, replicas, router in (("alone", 1, "prefix"), ("round robin", 2, "round-robin"), ("prefix", 2, "prefix")):
        cluster.deploy(replicas=replicas, request_router=router, enable_cache_report=True)
        await cluster.wait_for(replicas)
        async with cluster.client() as client, cluster.http() as http:
            assert (await http.post("/flush_cache", headers=ADMIN)).status_code == 200
            shares[name] = await run_load(client)
        record_property(name, round(shares[name], 3))
        while any((await cluster.samples("sglang:num_running_reqs")).values()):
            await asyncio.sleep(0.1)
        assert len(await cluster.samples("sglang:num_running_reqs")) == replicas
    assert shares["alone"] > 0.5
    assert shares["prefix"] >= 0.9 * shares["alone"]
    assert shares["prefix"] > shares["round robin"]


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


async def test_models_and_adapters_share_an_address(cluster: Cluster) -> None:
    """Requests go to the model that they name, and those of an adapter to one replica."""
    base = model_path("llama")
    folders = {f"a{seed}": adapter(base, seed, 4, ("q_proj", "v_proj")) for seed in range(3)}
    paths = [f"{name}={folder}" for name, folder in folders.items()]
    tiny = {"model_path": base, "served_model_name": "tiny", "lora_paths": paths, "max_loras_per_batch": 2,
            "replicas": 2, "enable_metrics": False, **PLAIN}  # fmt: skip
    await asyncio.to_thread(cluster.deploy, models=[{}, tiny])
    async with cluster.http() as http:
        names = [card["id"] for card in (await http.get("/v1/models")).json()["data"]]
        assert names == ["penstock-demo", "tiny", *folders]
        assert (await http.get("/v1/models/tiny")).json()["id"] == "tiny"
        assert (await http.post("/v1/completions", json={"model": "no", "prompt": "a"})).status_code == 404
        demo = await http.post("/v1/completions", json={"model": "penstock-demo", "prompt": "Hi", "max_tokens": 2})
        assert demo.status_code == 200, demo.text

        asked = [(name, number) for number in (5, 7, 17) for name in (None, *folders)]
        wanted = expected(base, folders, asked)
        sampling = {"max_new_tokens": len(wanted[0]), "temperature": 0, "ignore_eos": True}
        owners: dict[str | None, set[str]] = {}
        for (name, number), ids in zip(asked, wanted, strict=True):
            body = {"input_ids": list(prompts()[number]), "sampling_params": sampling}
            body |= {"model": "tiny"} if name is None else {"lora_path": name}
            answer = await http.post("/generate", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["output_ids"] == ids
            owners.setdefault(name, set()).add(answer.headers["x-replica"])
        assert all(len(owners[name]) == 1 for name in folders)


async def test_a_yaml_file_starts_another_application(cluster: Cluster, tmp_path: Path) -> None:
    """`serve run FILE.yaml` deploys beside the running application, under its own path."""
    file = tmp_path / "serve.yaml"
    args = {"random_seed": 1, "skip_server_warmup": True, "served_model_name": "second", "tp_size": 2}
    application = {"name": "second", "route_prefix": "/second", "import_path": "serve.on_ray:build_app", "args": args}
    file.write_text(json.dumps({"applications": [application]}))  # JSON is YAML
    address = ray.get_runtime_context().gcs_address
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "--address", address, str(file)]
    process = subprocess.Popen(command, env={**os.environ, "RAY_ADDRESS": address})
    try:
        async with cluster.http() as http:
            while (answer := await http.get("/second/v1/models")).status_code != 200:
                assert process.poll() is None
                await asyncio.sleep(0.5)
            assert answer.json()["data"][0]["id"] == "second"
            body = {"text": PREFIXES[0], "sampling_params": {"max_new_tokens": 8, "temperature": 0}}
            second, first = await http.post("/second/generate", json=body), await http.post("/generate", json=body)
            assert second.json()["text"] == first.json()["text"]
    finally:
        process.kill()  # a signal to end would delete all applications
        process.wait()


async def test_the_command_serves_models_of_a_file_beside_others(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    models = [{"served_model_name": "large"}, {"served_model_name": "small", "replicas": 1}]
    file.write_text(json.dumps(models))
    command = [sys.executable, "-m", "serve", "ray", "--models-file", str(file), "--name", "third"]
    command += ["--route-prefix", "/third", "--random-seed", "1", "--skip-server-warmup"]
    address = ray.get_runtime_context().gcs_address
    process = subprocess.Popen(command, env={**os.environ, "RAY_ADDRESS": address}, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    while "ready to roll" not in (line := await asyncio.to_thread(process.stderr.readline)):
        assert line
    async with cluster.http() as http:
        names = [card["id"] for card in (await http.get("/third/v1/models")).json()["data"]]
        assert names == ["large", "small"]
        answer = await http.post("/third/v1/completions", json={"model": "small", "prompt": "a", "max_tokens": 2})
        assert answer.json()["model"] == "small"
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.communicate)
        assert process.returncode == 0
        assert (await http.get("/third/v1/models")).status_code == 404
        assert (await http.get("/v1/models")).status_code == 200
