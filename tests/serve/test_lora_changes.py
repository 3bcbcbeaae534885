"""Adapters that change more than linear layers, and DoRA: tokens equal those of peft."""

from __future__ import annotations

from typing import Any

import pytest

from greedy import model_path
from lora_adapters import adapter, linear_layers
from lora_engine import PLAIN, answers, expected
from serve import Engine

CHANGES: dict[str, dict[str, Any]] = {
    "vocabulary": {"targets": ("embed_tokens", "lm_head", "q_proj")},
    "head alone": {"targets": ("lm_head",)},
    "tokens": {"targets": ("v_proj",), "trainable_token_indices": tuple(range(0, 90, 2))},
    "dora": {"targets": "all-linear", "use_dora": True},
}
SETTINGS = [
    pytest.param({}, id="default"),
    pytest.param({"tp_size": 2}, id="tp", marks=pytest.mark.slow),
    pytest.param({"pp_size": 2}, id="pp", marks=pytest.mark.slow),
    pytest.param({"chunked_prefill_size": 16, "page_size": 4, "max_loras_per_batch": 2}, id="chunked, two slots"),
]


@pytest.mark.parametrize("settings", SETTINGS)
async def test_every_change_gives_the_tokens_of_peft(settings: dict[str, Any]) -> None:
    base = model_path("llama")
    folders = {name: adapter(base, seed, 8, **change) for seed, (name, change) in enumerate(CHANGES.items())}
    folders["plain"] = adapter(base, 9)
    paths = [f"{name}={folder}" for name, folder in folders.items()]
    asked = [(name, number) for number in (5, 17) for name in (None, *folders)]
    async with Engine(base, lora_paths=paths, **{**PLAIN, **settings}) as engine:
        wanted = expected(base, folders, asked)
        assert len({tuple(ids) for ids in wanted[: len(folders) + 1]}) == len(folders) + 1
        for _ in range(2):
            assert await answers(engine, asked) == wanted
        engine.core.check()


@pytest.mark.parametrize("family", ["qwen2", "gemma2", pytest.param("phi3", marks=pytest.mark.slow)])
async def test_families_with_biases_scales_and_tied_heads(family: str) -> None:
    base = model_path(family)
    tokens = {"trainable_token_indices": tuple(range(0, 90, 2))}
    folders = {
        "dora": adapter(base, 1, 8, linear_layers(base), use_dora=True),
        "tokens": adapter(base, 2, 8, linear_layers(base), **tokens),
        "embedding": adapter(base, 3, 8, ("embed_tokens",)),
    }
    paths = [f"{name}={folder}" for name, folder in folders.items()]
    asked = [(name, number) for number in (5, 17) for name in (None, *folders)]
    async with Engine(base, lora_paths=paths, **PLAIN) as engine:
        wanted = expected(base, folders, asked)
        assert await answers(engine, asked) == wanted
