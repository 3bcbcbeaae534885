"""A server over HTTP whose weights change, and the answers of one that was started with given weights."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM

import http_server
import tiny_checkpoints
from serve import Engine
from serve.server.app import build_app

PREFIX = "remote_instance_weight_loader"
PLAIN: dict[str, Any] = {"skip_tokenizer_init": True, "random_seed": 1}
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
GREEDY = {"temperature": 0, "max_new_tokens": 10, "ignore_eos": True}
SHAPE = {"vocab_size": 131, "max_position_embeddings": 512}


def checkpoint(seed: int, family: str = "llama") -> str:
    return tiny_checkpoints.cached(family, seed=seed, **(SHAPE if family == "llama" else {}))


@asynccontextmanager
async def serving(path: str, **options: Any) -> AsyncIterator[tuple[Engine, httpx.AsyncClient]]:
    async with (
        Engine(path, **{**PLAIN, **options}) as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        yield engine, http


async def scores(engine: Engine) -> tuple[Any, ...]:
    """Return greedy tokens and all log-probabilities."""
    options: dict[str, Any] = {"return_logprob": True, "logprob_start_len": 0}
    meta = (await engine.generate(input_ids=PROMPT, sampling_params=GREEDY, **options))["meta_info"]
    return meta["output_token_logprobs"], meta["input_token_logprobs"]


async def state(engine: Engine) -> tuple[Any, ...]:
    return *await scores(engine), (await engine.weights_checker("checksum"))["ranks"]


_fresh: dict[tuple[str, str], tuple[Any, ...]] = {}


async def fresh_state(path: str, **options: Any) -> tuple[Any, ...]:
    """Return the state of an engine that was started with this checkpoint."""
    key = path, json.dumps(options)
    if key not in _fresh:
        async with Engine(path, **{**PLAIN, **options}) as engine:
            _fresh[key] = await state(engine)
    return _fresh[key]


@cache
def greedy(path: str) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        found = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=10, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
    return found[0, len(PROMPT) :].tolist()


async def post(http: httpx.AsyncClient, route: str, body: Any = None, status: int = 200) -> Any:
    response = await http.post(route, json={} if body is None else body)
    assert response.status_code == status, response.text
    return response.json() if response.headers.get("content-type") == "application/json" else None


async def ids(http: httpx.AsyncClient) -> list[int]:
    return (await post(http, "/generate", {"input_ids": PROMPT, "sampling_params": GREEDY}))["output_ids"]


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def copied_from(port: int, ranks: int = 1) -> dict[str, Any]:
    return {
        "load_format": "remote_instance",
        f"{PREFIX}_seed_instance_ip": "127.0.0.1",
        f"{PREFIX}_seed_instance_service_port": port,
        f"{PREFIX}_send_weights_group_ports": free_ports(ranks),
    }


def without_weights(path: str, folder: Path, **changes: Any) -> str:
    """Return a folder with a checkpoint's configuration, with `changes`, and without its weights."""
    shutil.copytree(path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
