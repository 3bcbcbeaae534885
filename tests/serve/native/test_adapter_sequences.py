"""Sequences of loads, unloads and requests over HTTP, as SGLang tests them (test_lora_update.py)."""

from __future__ import annotations

from typing import Any, NamedTuple

import httpx
import pytest

import http_server
from greedy import NUM_NEW, model_path, prompts
from lora_adapters import adapted, adapter
from serve import Engine
from serve.server.app import build_app

BASE = model_path("llama")
PROMPTS = [prompts()[number] for number in (0, 5, 7)]
SAMPLING = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
NARROW, WIDE, LARGE = (
    adapter(BASE, 1, 8, ("q_proj", "v_proj")),
    adapter(BASE, 2, 8, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
    adapter(BASE, 3, 32, ("q_proj", "down_proj")),
)
FOLDERS = {"narrow": NARROW, "wide": WIDE, "large": LARGE}


class Load(NamedTuple):
    name: str
    error: str | None = None
    pinned: bool = False


class Unload(NamedTuple):
    name: str
    error: str | None = None


class Ask(NamedTuple):
    """A request for all prompts with each of these adapters, in one batch."""

    names: list[str | None]
    error: str | None = None


Step = Load | Unload | Ask
ALL: list[str | None] = ["narrow", "wide", "large", None]
SEQUENCES: dict[str, tuple[dict[str, Any], list[Step]]] = {
    "adapters of the start in three forms": (
        {"lora_paths": [NARROW, f"wide={WIDE}", {"lora_name": "large", "lora_path": LARGE, "pinned": False}]},
        [
            Load("wide", "already loaded"),
            Unload("wide"),
            Load("wide"),
            Ask([NARROW, "wide", "large"]),
            Unload(NARROW),
            Unload("large"),
            Ask(["wide"]),
            Ask([NARROW], "not loaded"),
            Ask(["large"], "not loaded"),
            Load("large"),
            Ask(["wide", "large"]),
            Unload("large"),
            Unload("wide"),
            Unload("wide", "not loaded"),
            Ask([None]),
        ],
    ),
    "none at the start": (
        {"enable_lora": True, "max_lora_rank": 64, "lora_target_modules": ["all"], "max_loras_per_batch": 4},
        [
            Ask(["narrow"], "not loaded"),
            Load("narrow"),
            Load("wide"),
            Load("large"),
            Load("narrow", "already loaded"),
            Ask(ALL),
            Unload("narrow"),
            Ask([None, "wide", "large", None]),
            Ask(["narrow", "wide"], "not loaded"),
        ],
    ),
    "targets follow the option": (
        {"enable_lora": True, "max_lora_rank": 64, "lora_target_modules": ["q_proj", "v_proj"]},
        [Load("narrow"), Load("wide", "--lora-target-modules"), Ask(["narrow", None]), Ask(["wide"], "not loaded")],
    ),
    "a smaller adapter does not limit the targets": (
        {"lora_paths": [f"narrow={NARROW}"]},
        [Ask(["narrow"]), Load("wide"), Ask(["narrow", "wide", None])],
    ),
    "the largest rank of the start is the limit": (
        {"lora_paths": [f"wide={WIDE}"]},
        [Load("large", "--max-lora-rank"), Load("narrow"), Ask(["narrow", "wide", None])],
    ),
    "one slot stays free of pinned adapters": (
        {"enable_lora": True, "max_lora_rank": 64, "max_loras_per_batch": 2},
        [
            Load("narrow", pinned=True),
            Load("wide", "pinned", pinned=True),
            Load("wide"),
            Load("large"),
            Ask(["narrow", "wide", None]),
            Ask(["narrow", "large", "wide"]),
            Unload("narrow"),
            Load("narrow"),
            Ask(ALL),
        ],
    ),
    "adapters beyond the limit of memory leave and come back": (
        {"enable_lora": True, "max_lora_rank": 64, "max_loras_per_batch": 2, "max_loaded_loras": 2},
        [Load("narrow"), Load("wide"), Load("large"), Ask(["wide", "large"]), Ask(["narrow"]), Ask(["large", None])],
    ),
}


def expected(name: str | None, prompt: list[int]) -> list[int]:
    return adapted(BASE, None if name is None else FOLDERS.get(name, name), prompt)


async def take(step: Step, http: httpx.AsyncClient) -> None:
    match step:
        case Load(name, error, pinned):
            body: dict[str, Any] = {"lora_name": name, "lora_path": FOLDERS[name], "pinned": pinned}
            answer = await http.post("/load_lora_adapter", json=body)
            assert (name in answer.json()["loaded_adapters"]) == (error in (None, "already loaded"))
        case Unload(name, error):
            answer = await http.post("/unload_lora_adapter", json={"lora_name": name})
            assert name not in answer.json()["loaded_adapters"]
        case Ask(names, error):
            asked = [(name, prompt) for prompt in PROMPTS for name in names]
            body = {"input_ids": [list(prompt) for _, prompt in asked], "lora_path": [name for name, _ in asked]}
            answer = await http.post("/generate", json={**body, "sampling_params": SAMPLING})
            if error is None:
                assert [each["output_ids"] for each in answer.json()] == [expected(*each) for each in asked]
    assert answer.status_code == (200 if error is None else 400), answer.text
    if error is not None:
        assert error in answer.text


@pytest.mark.parametrize("sequence", SEQUENCES)
async def test_sequences_of_loads_unloads_and_requests(sequence: str) -> None:
    options, steps = SEQUENCES[sequence]
    async with (
        Engine(BASE, skip_tokenizer_init=True, **options) as engine,
        http_server.serving(build_app(engine.core)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as http,
    ):
        for step in steps:
            await take(step, http)
        engine.core.check()
