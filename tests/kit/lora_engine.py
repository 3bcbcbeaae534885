"""Ask an engine for greedy tokens with adapters, and peft for the tokens that it should give."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from greedy import NUM_NEW, prompts
from lora_adapters import adapted
from runtime.request import Request
from runtime.sampling_params import SamplingParams
from serve import Engine

PLAIN: dict[str, Any] = {"skip_tokenizer_init": True, "random_seed": 1}
SAMPLING = SamplingParams(temperature=0.0, max_new_tokens=NUM_NEW, ignore_eos=True)
Asked = tuple[str | None, int]  # (name of the adapter, number of the prompt)


async def ids_of(engine: Engine, name: str | None, prompt: Sequence[int]) -> list[int]:
    request = Request(ids=tuple(prompt), sampling=SAMPLING, lora=name)
    pieces = [piece async for piece in engine.core.submit(request).chunks()]
    return [token for piece in pieces for chunk in piece for token in chunk.ids]


async def answers(engine: Engine, asked: Sequence[Asked]) -> list[list[int]]:
    return await asyncio.gather(*(ids_of(engine, name, prompts()[number]) for name, number in asked))


def expected(base: str, folders: dict[str, str], asked: Sequence[Asked]) -> list[list[int]]:
    return [adapted(base, None if name is None else folders[name], prompts()[number]) for name, number in asked]
