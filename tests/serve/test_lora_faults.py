"""Adapters on quantised bases, adapters that come and go under traffic, and faults that tests must find."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import quantized_checkpoints
from greedy import model_path, prompts
from lora_adapters import adapted, adapter
from lora_engine import PLAIN, answers, expected, ids_of
from ops.machine import Machine
from runtime.config import Args
from runtime.layers.low_rank import AdapterPart, LowRankSlots
from runtime.loading.adapter_config import AdapterConfig
from runtime.scheduler.adapter_slots import AdapterSlots
from serve import Engine
from serve.cli.explain import explain


@pytest.mark.parametrize("form", ["gptq", pytest.param("awq", marks=pytest.mark.slow)])
async def test_quantised_bases_take_adapters(form: str, tmp_path: Path) -> None:
    quantised, plain = quantized_checkpoints.write(tmp_path, form)
    folders = {"a": adapter(plain, 1), "dora": adapter(plain, 2, 4, use_dora=True)}
    asked = [(name, number) for number in (5, 17) for name in (None, *folders)]
    paths = [f"{name}={folder}" for name, folder in folders.items()]
    async with Engine(quantised, lora_paths=paths, dtype="float32", **PLAIN) as engine:
        wanted = expected(plain, folders, asked)
        assert wanted[0] != wanted[1] != wanted[2]
        assert await answers(engine, asked) == wanted


def wrong_slot(patch: pytest.MonkeyPatch) -> None:
    enter = AdapterSlots.enter
    patch.setattr(AdapterSlots, "enter", lambda slots, sequence: max(enter(slots, sequence), 1) % 2 + 1)


def wrong_scale(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AdapterConfig, "scale", lambda config, layer, rank: config.alpha / 8)


def missing_target(patch: pytest.MonkeyPatch) -> None:
    place, numbers = LowRankSlots.place, count()

    def placed(slots: LowRankSlots, slot: int, part: AdapterPart | None) -> None:
        place(slots, slot, None if next(numbers) == 3 else part)

    patch.setattr(LowRankSlots, "place", placed)


def stale_slot(patch: pytest.MonkeyPatch) -> None:
    place = LowRankSlots.place

    def placed(slots: LowRankSlots, slot: int, part: AdapterPart | None) -> None:
        if not slots.weights.ranks[slot - 1]:  # only the first adapter of a slot
            place(slots, slot, part)

    patch.setattr(LowRankSlots, "place", placed)


def shifted_parts(patch: pytest.MonkeyPatch) -> None:
    place = LowRankSlots.place

    def placed(slots: LowRankSlots, slot: int, part: AdapterPart | None) -> None:
        place(slots, slot, part and part._replace(a=torch.roll(part.a, 1, 0)))

    patch.setattr(LowRankSlots, "place", placed)


FAULTS = [None, wrong_slot, wrong_scale, missing_target, stale_slot, shifted_parts]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__ if fault else "none")
async def test_faults_change_tokens(
    fault: Callable[[pytest.MonkeyPatch], None] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = model_path("llama")
    folders = {"a": adapter(base, 1), "b": adapter(base, 2, 4, ("q_proj", "v_proj")), "c": adapter(base, 4)}
    paths = [f"{name}={folder}" for name, folder in folders.items()]
    asked = [(name, number) for number in (5, 17) for name in (None, *folders)]
    wanted = expected(base, folders, asked)
    if fault is not None:
        fault(monkeypatch)
    async with Engine(base, lora_paths=paths, max_loras_per_batch=2, **PLAIN) as engine:
        assert (await answers(engine, asked) == wanted) is (fault is None)


@pytest.mark.parametrize("times", [20, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_loads_under_traffic_leave_nothing_behind(times: int) -> None:
    base, prompt = model_path("llama"), prompts()[17]
    folders = [adapter(base, seed, 4, ("q_proj", "down_proj")) for seed in range(4)]
    wanted = [adapted(base, folder, prompt) for folder in folders]
    plain = adapted(base, None, prompt)
    async with Engine(base, enable_lora=True, max_loras_per_batch=2, **PLAIN) as engine:
        registry = engine.core.adapters
        done = asyncio.Event()

        async def others() -> None:
            while not done.is_set():
                assert await ids_of(engine, None, prompt) == plain

        async def uses(number: int) -> None:
            assert await ids_of(engine, f"adapter-{number}", prompt) == wanted[number % 4]

        traffic = asyncio.create_task(others())
        for number in range(times):
            await registry.load(f"adapter-{number}", folders[number % 4])
            running = asyncio.create_task(uses(number)) if number % 4 == 0 else None
            await asyncio.sleep(0)
            assert await registry.unload(f"adapter-{number}")
            if running is not None:
                await running
        done.set()
        await traffic
        engine.core.check()
        rank = rank_adapters(engine)._loaded
        assert registry.num_resident == len(registry.adapters) == len(rank) == 0
        assert not registry._retired
        assert len(registry._tasks) == 0


def rank_adapters(engine: Engine) -> Any:
    [actor] = engine.core._scheduler.alive
    runner: Any = actor.runner
    return runner._executor.rank.adapters


async def test_explain_knows_the_memory_of_the_slots() -> None:
    words = [
        "--model-path",
        model_path("llama"),
        "--enable-lora",
        "--max-loras-per-batch",
        "3",
        "--max-lora-rank",
        "20",
    ]
    rows, refusals = explain(Args.parse(words), Machine.probe())
    [row] = [row for row in rows if row.option == "(adapter slots)"]
    assert not refusals
    options = {"enable_lora": True, "max_loras_per_batch": 3, "max_lora_rank": 20}
    async with Engine(model_path("llama"), **options, **PLAIN) as engine:
        slots = rank_adapters(engine).nbytes / 2**20
    assert float(row.done.split()[0]) == pytest.approx(slots, abs=0.06)


async def test_layers_that_are_not_targets_are_refused() -> None:
    base = model_path("llama")
    options = {"lora_target_modules": ["q_proj", "embed_tokens"], "enable_lora": True}
    async with Engine(base, **options, **PLAIN) as engine:
        for targets in (("q_proj",), ("embed_tokens",)):
            assert (await engine.load_lora_adapter("-".join(targets), adapter(base, 1, 8, targets)))["success"]
        for targets in (("o_proj",), ("lm_head",)):
            answer = await engine.load_lora_adapter("other", adapter(base, 1, 8, targets))
            assert targets[0] in answer["error_message"]
