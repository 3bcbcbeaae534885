"""LoRA adapters over HTTP: every API chooses them, and they come and go while the server runs."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import pickle
import shutil
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import httpx
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from safetensors.torch import load_file, save_file

import http_server
from greedy import NUM_NEW, model_path, prompts
from lora_adapters import adapted, adapter
from runtime.actors import adapter_folder
from runtime.errors import CheckpointError
from serve import Engine
from serve.server.app import build_app

BASE = model_path("llama")
PROMPT = prompts()[5]
SAMPLING = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}


@pytest.fixture
async def http(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    folder = tmp_path / "on-demand"
    folder.mkdir()
    shutil.copytree(adapter(BASE, 2), folder / "later")
    os.symlink(adapter(BASE, 2), folder / "link")
    options: dict[str, Any] = {"lora_dir": str(folder), "served_model_name": "base", "skip_tokenizer_init": True}
    async with (
        Engine(BASE, lora_paths=[f"a={adapter(BASE, 1)}"], **options) as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        yield client


async def tokens(http: httpx.AsyncClient, name: str | None) -> list[int]:
    body = {"input_ids": PROMPT, "sampling_params": SAMPLING, "lora_path": name}
    answer = await http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["output_ids"]


async def test_adapters_are_chosen_loaded_and_unloaded(http: httpx.AsyncClient) -> None:
    first, second, plain = (adapted(BASE, folder, PROMPT) for folder in (adapter(BASE, 1), adapter(BASE, 2), None))
    batch = {"input_ids": [PROMPT] * 3, "sampling_params": SAMPLING, "lora_path": ["a", None, "later"]}
    answers = (await http.post("/generate", json=batch)).json()
    assert [answer["output_ids"] for answer in answers] == [first, plain, second]

    loading = {"lora_name": "b", "lora_path": adapter(BASE, 2)}
    answer = await http.post("/load_lora_adapter", json=loading)
    assert (answer.status_code, answer.json()["success"]) == (200, True)
    assert answer.json()["loaded_adapters"]["b"] == adapter(BASE, 2)
    assert await tokens(http, "b") == second
    answer = await http.post("/load_lora_adapter", json=loading)
    assert (answer.status_code, answer.json()["success"]) == (400, False)
    assert "already loaded" in answer.json()["error_message"]

    replacing = {"lora_name": "b", "lora_path": adapter(BASE, 1), "load_inplace": True}
    answer = await http.post("/v1/load_lora_adapter", json=replacing)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'b' added successfully.")
    assert await tokens(http, "b") == first
    cards = {card["id"]: card for card in (await http.get("/v1/models")).json()["data"]}
    assert (cards["b"]["root"], cards["b"]["parent"]) == (adapter(BASE, 1), "base")
    names = [model["name"] for model in (await http.get("/api/tags")).json()["models"]]
    assert names[0] == "base"
    assert {"a", "b", "later"} <= set(names)

    answer = await http.post("/v1/unload_lora_adapter", json={"lora_name": "b"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'b' removed successfully.")
    answer = await http.post("/unload_lora_adapter", json={"lora_name": "b"})
    assert answer.status_code == 400
    assert "b" not in answer.json()["loaded_adapters"]
    answer = await http.post("/generate", json={"input_ids": PROMPT, "lora_path": "b"})
    assert answer.status_code == 400
    assert "lora_path" in answer.text
    assert await tokens(http, None) == plain


@pytest.mark.parametrize("name", ["../later", "/etc", "link", ".", "x" * 1_000_000, "base"])
async def test_names_cannot_leave_the_folder(http: httpx.AsyncClient, name: str) -> None:
    answer = await http.post("/generate", json={"input_ids": PROMPT, "lora_path": name})
    assert answer.status_code == 400
    assert len(answer.text) < 1000


async def test_adapters_of_a_store_are_copied_when_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_folder, "REFRESH_S", 0.0)
    store = fsspec.filesystem("memory")

    def put(name: str, seed: int) -> None:
        for file in Path(adapter(BASE, seed)).iterdir():
            store.pipe(f"/adapters/{name}/{file.name}", file.read_bytes())

    put("early", 1)
    options: dict[str, Any] = {"lora_dir": "memory://adapters", "download_dir": str(tmp_path)}
    async with (
        Engine(BASE, skip_tokenizer_init=True, **options) as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        assert not [*tmp_path.iterdir()]
        answers = await asyncio.gather(*(tokens(http, "early") for _ in range(3)))
        assert answers == [adapted(BASE, adapter(BASE, 1), PROMPT)] * 3
        put("late", 2)
        body = {"input_ids": PROMPT, "lora_path": "late", "sampling_params": SAMPLING}
        while (answer := await http.post("/generate", json=body)).status_code == 400:
            await asyncio.sleep(0.01)
        assert answer.json()["output_ids"] == adapted(BASE, adapter(BASE, 2), PROMPT)
        assert (await http.post("/generate", json={**body, "lora_path": "../early"})).status_code == 400
        assert len([*tmp_path.iterdir()]) == 2

        def fails(*_: Any) -> str:
            raise CheckpointError("memory://adapters cannot be read: a key of the store")

        put("third", 3)
        monkeypatch.setattr(adapter_folder, "locate", fails)
        body["lora_path"] = "third"
        while "is not loaded" in (answer := await http.post("/generate", json=body)).text:
            await asyncio.sleep(0.01)
        assert answer.status_code == 503
        assert "memory" not in answer.text


async def test_a_slow_copy_delays_only_requests_for_its_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, go_on = fsspec.filesystem("memory"), asyncio.Event()
    for seed, name in enumerate(("slow", "other")):
        for file in Path(adapter(BASE, seed)).iterdir():
            store.pipe(f"/several/{name}/{file.name}", file.read_bytes())
    fetched = adapter_folder.AdapterFolder.fetched

    async def held(self: adapter_folder.AdapterFolder, path: str) -> str:
        if path.endswith("slow"):
            await go_on.wait()
        return await fetched(self, path)

    monkeypatch.setattr(adapter_folder.AdapterFolder, "fetched", held)
    options: dict[str, Any] = {"lora_dir": "memory://several", "download_dir": str(tmp_path)}
    async with Engine(BASE, skip_tokenizer_init=True, **options) as engine:
        registry = engine.core.adapters
        slow = [asyncio.create_task(registry.ready(registry.acquire("slow"))) for _ in range(2)]
        await asyncio.sleep(0)
        for _ in range(2):  # it is copied, and then it is there
            await asyncio.wait_for(registry.ready(registry.acquire("other")), 30)
        assert not any(task.done() for task in slow)
        go_on.set()
        await asyncio.gather(*slow)


async def test_adapter_that_does_not_fit_is_refused_by_name(http: httpx.AsyncClient, tmp_path: Path) -> None:
    damages: dict[str, Any] = {
        "extra": lambda tensors: {**tensors, "base_model.model.extra": torch.ones(2)},
        "half": lambda tensors: dict(list(tensors.items())[1:]),
        "empty": lambda tensors: {},
    }
    reasons = {"extra": "extra", "half": "has no lora_A", "empty": "has no tensors"}
    for name, damage in damages.items():
        folder = shutil.copytree(adapter(BASE, 1), tmp_path / name)
        path = folder / "adapter_model.safetensors"
        save_file(damage(load_file(path)), path)
        answer = await http.post("/load_lora_adapter", json={"lora_name": name, "lora_path": str(folder)})
        assert answer.status_code == 400
        assert reasons[name] in answer.text
        assert name not in answer.json()["loaded_adapters"]
    cut = shutil.copytree(adapter(BASE, 1), tmp_path / "cut")
    os.truncate(cut / "adapter_model.safetensors", 1000)
    answer = await http.post("/load_lora_adapter", json={"lora_name": "cut", "lora_path": str(cut)})
    assert answer.status_code == 400
    assert "cannot be read" in answer.text
    assert await tokens(http, "a") == adapted(BASE, adapter(BASE, 1), PROMPT)


async def test_adapters_come_from_tensors_in_the_body(http: httpx.AsyncClient) -> None:
    path = "/load_lora_adapter_from_tensors"
    folder = Path(adapter(BASE, 2))
    tensors = (folder / "adapter_model.safetensors").read_bytes()
    config = json.loads((folder / "adapter_config.json").read_bytes())
    body = {"lora_name": "t", "config_dict": config, "serialized_tensors": base64.b64encode(tensors).decode()}
    answer = await http.post(path, json=body)
    assert (answer.status_code, answer.json()["success"]) == (200, True), answer.text
    kept = Path(answer.json()["loaded_adapters"]["t"])
    assert await tokens(http, "t") == adapted(BASE, str(folder), PROMPT)
    assert (await http.post(path, json=body)).status_code == 400  # the name is in use
    assert len(list(kept.parent.iterdir())) == 1
    wrong = {
        "never read": pickle.dumps({"weight": 1}),
        "cannot be read": tensors[:-8],
        "safetensors": b"",
        "must be base64": None,
    }
    for message, content in wrong.items():
        text = "§" if content is None else base64.b64encode(content).decode()
        answer = await http.post(path, json={**body, "lora_name": "u", "serialized_tensors": text})
        assert (answer.status_code, answer.json()["success"]) == (400, False)
        assert message in answer.json()["error_message"]
    assert (await http.post("/unload_lora_adapter", json={"lora_name": "t"})).status_code == 200
    assert not kept.exists()


async def test_python_loads_adapters_from_memory() -> None:
    folder = Path(adapter(BASE, 2))
    config = json.loads((folder / "adapter_config.json").read_bytes())
    async with Engine(BASE, enable_lora=True, skip_tokenizer_init=True) as engine:
        tensors = (folder / "adapter_model.safetensors").read_bytes()
        assert (await engine.load_lora_adapter_from_tensors("t", tensors, config))["success"]
        answer = await engine.generate(input_ids=PROMPT, sampling_params=SAMPLING, lora_path="t")
        assert answer["output_ids"] == adapted(BASE, str(folder), PROMPT)
        refused = await engine.load_lora_adapter_from_tensors("u", tensors, {**config, "use_dora": 3})
        assert not refused["success"]
        kept = Path(engine.core.adapters.adapters[0].path)
    assert not kept.parent.exists()


async def test_openai_names_adapters_in_the_model(tmp_path: Path) -> None:
    async with (
        Engine(lora_dir=str(tmp_path), served_model_name="base") as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        path = engine.core.facts.path
        folder = adapter(path, 1)
        assert (await engine.load_lora_adapter("a", folder))["success"]
        assert not (await engine.load_lora_adapter("base", folder))["success"]
        asked: dict[str, Any] = {"prompt": "Once", "max_tokens": 8, "temperature": 0, "logprobs": 0}
        found = {}
        for model in ("base", "a", "base:a"):
            answer = await http.post("/v1/completions", json={**asked, "model": model})
            assert (answer.status_code, answer.json()["model"]) == (200, model)
            found[model] = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
        assert found["a"] == pytest.approx(found["base:a"], abs=1e-3)
        assert found["a"] != pytest.approx(found["base"], abs=1e-2)
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
        for route, body in (("/v1/completions", asked), ("/v1/chat/completions", chat), ("/v1/messages", chat)):
            for model in ("b", "base:b", "base:"):
                assert (await http.post(route, json={**body, "model": model})).status_code == 404
            assert (await http.post(route, json={**body, "model": "a"})).json()["model"] == "a"
        answer = await http.post("/v1/completions", json={**asked, "model": "a", "lora_path": "b"})
        assert answer.status_code == 400
        assert "lora_path" in answer.text
        assert {entry["num_requests"] for entry in engine.core.adapters.describe()} == {4 + 1}
        assert (await engine.unload_lora_adapter("a"))["loaded_adapters"] == {}


async def test_metrics_count_adapters() -> None:
    options: dict[str, Any] = {"skip_tokenizer_init": True, "enable_metrics": True, "max_loras_per_batch": 2}
    async with (
        Engine(
            BASE, lora_paths=[f"{name}={adapter(BASE, 1)}" for name in "ab"], max_loaded_loras=2, **options
        ) as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as client,
    ):
        for name in ("a", "a", "b", None):
            await tokens(client, name)
        await client.post("/load_lora_adapter", json={"lora_name": "c", "lora_path": adapter(BASE, 2)})
        families = list(text_string_to_metric_families((await client.get("/metrics")).text))
    values = {sample.name: sample for family in families for sample in family.samples if "_bucket" not in sample.name}
    requests = [
        each for family in families for each in family.samples if each.name == "penstock:adapter_requests_total"
    ]
    assert {each.labels["lora_name"]: each.value for each in requests} == {"a": 2, "b": 1}
    assert values["penstock:loaded_adapters"].value == 2
    assert values["penstock:adapter_evictions_total"].value == 1
    assert values["penstock:adapter_load_seconds_count"].value == 3
    assert values["sglang:lora_pool_slots_total"].value == 2
    assert values["sglang:lora_pool_slots_used"].value == 0
    assert values["vllm:lora_requests_info"].labels["max_lora"] == "2"


async def test_loading_ends_although_its_caller_gave_up() -> None:
    async with Engine(BASE, enable_lora=True, skip_tokenizer_init=True) as engine:
        registry = engine.core.adapters
        loading = asyncio.create_task(registry.load("a", adapter(BASE, 1)))
        await asyncio.sleep(0)
        loading.cancel()
        with suppress(asyncio.CancelledError):
            await loading
        async with asyncio.timeout(10):
            while "a" not in registry:
                await asyncio.sleep(0.01)
        assert registry.num_resident == 1
        assert await registry.unload("a")
        assert registry.num_resident == 0
