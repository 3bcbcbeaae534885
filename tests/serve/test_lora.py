"""LoRA adapters: tokens equal those of peft in every batch."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from greedy import FAMILIES, model_path, prompts
from lora_adapters import adapted, adapter, linear_layers, merged_pair
from lora_engine import PLAIN, SAMPLING, answers, expected, ids_of
from published_names import PUBLISHED
from runtime.errors import InvalidRequest
from runtime.layers.linear import Linear
from runtime.layers.low_rank import LowRankSlots
from runtime.request import Request
from serve import Engine

SETTINGS = [
    pytest.param({}, id="default"),
    pytest.param({"chunked_prefill_size": 16, "page_size": 4}, id="chunked"),
    pytest.param({"disable_overlap_schedule": True, "attention_backend": "torch_native"}, id="torch attention"),
    pytest.param({"max_loras_per_batch": 2, "max_running_requests": 4}, id="two slots"),
    pytest.param({"lora_backend": "torch_native"}, id="torch"),
    pytest.param({"tp_size": 2}, id="tp"),
    pytest.param({"pp_size": 2}, id="pp"),
    pytest.param({"dp_size": 2}, id="dp"),
]


@pytest.mark.parametrize("settings", SETTINGS)
async def test_tokens_are_those_of_peft(settings: dict[str, Any]) -> None:
    base = model_path("llama")
    folders = {
        "a": adapter(base, 1),
        "b": adapter(base, 2, 4, ("q_proj", "v_proj")),
        "c": adapter(base, 3, 13, ("down_proj", "o_proj"), use_rslora=True),
    }
    paths = [f"{name}={folder}" for name, folder in folders.items()]
    asked = [(name, number) for number in (0, 5, 7, 17) for name in (None, "a", "b", "c")]
    async with Engine(base, lora_paths=paths, **{**PLAIN, **settings}) as engine:
        wanted = expected(base, folders, asked)
        assert wanted[0] != wanted[1] != wanted[2] != wanted[3]
        for _ in range(2):  # the second time with cached prefixes, separate for each adapter
            assert await answers(engine, asked) == wanted
        engine.core.check()


async def test_eight_adapters_share_a_batch_that_is_retracted() -> None:
    base = model_path("llama")
    folders = {str(seed): adapter(base, seed, 4 + seed, ("q_proj", "down_proj")) for seed in range(8)}
    paths = [f"{name}={folder}" for name, folder in folders.items()]
    asked = [(name, number) for number in (5, 17) for name in (None, *folders)]
    options = {"max_total_tokens": 320, "schedule_conservativeness": 0.0, "page_size": 1}
    async with Engine(base, lora_paths=paths, **PLAIN, **options) as engine:
        wanted = expected(base, folders, asked)
        assert await answers(engine, asked) == wanted
        assert engine.core.status().num_retracted
        engine.core.check()


async def test_no_adapter_waits_for_ever_for_a_slot() -> None:
    """With one slot and two busy adapters, another one runs after the longest request that started before it."""
    base = model_path("llama")
    folders = {str(seed): adapter(base, seed, 4, ("q_proj", "down_proj")) for seed in range(3)}
    paths = [f"{name}={folder}" for name, folder in folders.items()]
    long = replace(SAMPLING, max_new_tokens=40)
    async with Engine(base, lora_paths=paths, max_loras_per_batch=1, **PLAIN) as engine:
        ends: list[str] = []

        async def ask(name: str) -> None:
            request = Request(ids=tuple(prompts()[5]), sampling=long, lora=name)
            async for _ in engine.core.submit(request).chunks():
                pass
            ends.append(name)

        async def busy(name: str) -> None:
            while "2" not in ends:
                await asyncio.gather(*(ask(name) for _ in range(3)))

        crowds = [asyncio.create_task(busy(name)) for name in "01"]
        while len(ends) < 6:
            await asyncio.sleep(0.001)
        begun = len(ends)
        await ask("2")
        # The requests that ran and waited before it: at most three of each crowd, and those that one of these brought.
        assert len(ends) - begun <= 10
        await asyncio.gather(*crowds)


TYPICAL = ("bloom", "deepseek_v3", "falcon", "gpt_oss", "granitemoehybrid", "lfm2", "phi3", "qwen3_next")
# Their own modules, which are not in transformers, have one projection of queries, keys and values.
BY_OTHER_MODULES = ("baichuan", "baichuan2", "internlm2", *PUBLISHED)
SOON_ON_RANKS = ("baichuan2", "chatglm")  # with two ranks in the default test run


@pytest.mark.parametrize(
    "family",
    [
        family if family in TYPICAL else pytest.param(family, marks=pytest.mark.slow)
        for family in FAMILIES
        if family not in BY_OTHER_MODULES
    ],
)
async def test_every_family_takes_adapters(family: str) -> None:
    base, asked = model_path(family), [(name, number) for number in (5, 7) for name in (None, "a", "b")]
    ranks = (4, 64) if len(family) % 2 else (13, 16)
    folders = {name: adapter(base, seed, ranks[seed], linear_layers(base)) for seed, name in enumerate("ab")}
    paths = [f"{name}={folder}" for name, folder in folders.items()]
    async with Engine(base, lora_paths=paths, **PLAIN) as engine:
        wanted = expected(base, folders, asked)
        assert wanted[0] != wanted[1] != wanted[2]
        assert await answers(engine, asked) == wanted


@pytest.mark.parametrize(
    "family",
    [family if family in TYPICAL else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES],
)
async def test_every_layer_with_slots_reads_them(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an adapter of this layer, for example of a router, would have no effect."""
    unread: dict[LowRankSlots, str] = {}
    take, add = Linear.take_adapters, LowRankSlots.add

    def taken(layer: Linear, slots: LowRankSlots) -> None:
        unread[slots] = layer.layout.sub_layers[0].name
        take(layer, slots)

    def added(slots: LowRankSlots, *operands: Any) -> None:
        unread.pop(slots, None)
        add(slots, *operands)

    monkeypatch.setattr(Linear, "take_adapters", taken)
    monkeypatch.setattr(LowRankSlots, "add", added)
    async with Engine(model_path(family), enable_lora=True, **PLAIN) as engine:
        await answers(engine, [(None, 5)])
    assert not unread


@pytest.mark.parametrize(
    ("family", "tp_size"),
    [
        pytest.param(family, ranks, marks=[pytest.mark.slow] if ranks > 1 and family not in SOON_ON_RANKS else [])
        for family in BY_OTHER_MODULES
        for ranks in (1, 2)
    ],
)
async def test_fused_projections_take_adapters_as_merged_weights(family: str, tp_size: int, tmp_path: Path) -> None:
    base, asked = model_path(family), [(None, 5), ("a", 5), ("a", 7)]
    folder, merged = merged_pair(base, tmp_path)
    async with Engine(merged, **PLAIN) as engine:
        wanted = await answers(engine, [(None, number) for _, number in asked])
    async with Engine(base, lora_paths=[f"a={folder}"], tp_size=tp_size, **PLAIN) as engine:
        found = await answers(engine, asked)
    assert found[1:] == wanted[1:]
    assert found[0] != wanted[0]


@pytest.mark.parametrize("count", [30, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(600)])])
async def test_many_adapters_share_few_slots(count: int) -> None:
    """Requests arrive at random, some are cancelled, and host memory holds only some of the adapters."""
    base, random = model_path("llama"), Random(count)
    folders = {str(seed): adapter(base, seed, 4, ("q_proj", "down_proj")) for seed in range(count)}
    paths = [f"{name}={folder}" for name, folder in folders.items()]
    options = {"max_loras_per_batch": 4, "max_loaded_loras": count // 3, "max_running_requests": 16}
    async with Engine(base, lora_paths=paths, **PLAIN, **options) as engine:
        assert engine.core.adapters.num_resident == count // 3

        async def client(name: str, number: int) -> None:
            await asyncio.sleep(random.uniform(0, 0.3))
            answer = asyncio.create_task(ids_of(engine, name, prompts()[number]))
            if random.random() < 0.2:
                await asyncio.sleep(random.uniform(0, 0.05))
                answer.cancel()
            with suppress(asyncio.CancelledError):
                assert await answer == adapted(base, folders[name], prompts()[number])

        chosen = [(random.choice([*folders]), random.choice([5, 7, 17])) for _ in range(2 * count)]
        for name, number in chosen:  # before, because peft would hold the event loop
            adapted(base, folders[name], prompts()[number])
        await asyncio.gather(*(client(*each) for each in chosen))
        engine.core.check()
        registry = engine.core.adapters
        assert registry.num_resident <= count // 3
        assert registry.num_evictions
        assert not any(each["num_running"] for each in registry.describe())


async def test_a_name_keeps_its_weights_for_running_requests() -> None:
    base = model_path("llama")
    one, other = adapter(base, 1), adapter(base, 2)
    prompt = prompts()[5]
    async with Engine(base, enable_lora=True, **PLAIN) as engine:
        registry = engine.core.adapters
        with pytest.raises(InvalidRequest, match="is not loaded"):
            await ids_of(engine, "a", prompt)
        await registry.load("a", one)
        with pytest.raises(InvalidRequest, match="already loaded"):
            await registry.load("a", other)
        before = [asyncio.create_task(ids_of(engine, "a", prompt)) for _ in range(3)]
        await asyncio.sleep(0)
        await registry.load("a", other, replace=True)
        after = await ids_of(engine, "a", prompt)
        assert await asyncio.gather(*before) == [adapted(base, one, prompt)] * 3
        assert after == adapted(base, other, prompt)
        assert adapted(base, one, prompt) != after
        running = asyncio.create_task(ids_of(engine, "a", prompt))
        await asyncio.sleep(0)
        assert await registry.unload("a")
        assert await running == after
        assert registry.num_resident == 0
        for _ in range(20):
            await registry.load("a", one, pinned=True)
            await registry.unload("a")
        assert registry.num_resident == 0
        engine.core.check()


async def test_without_lora_a_named_adapter_is_refused() -> None:
    async with Engine(model_path("llama"), **PLAIN) as engine:
        with pytest.raises(InvalidRequest, match="--enable-lora"):
            await engine.generate(input_ids=prompts()[5], lora_path="a")
