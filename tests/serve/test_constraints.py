"""Rows that wait for host data, in the whole engine: outputs equal the reference, and other rows do not wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from greedy import NUM_NEW, model_path, prompts, reference
from late_host_data import LateHostData, bitmask
from runtime.actors.engine_core import EngineCore
from runtime.constraint import Constraint, HostData, Output
from runtime.request import Chunk, Request
from runtime.sampling_params import SamplingParams
from runtime.scheduler import fast_forward
from serve import Engine

VOCAB = 128
FAMILY = "llama"
MASKED = (1, 3, 7, 12)  # indices of the constrained prompts
WAYS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "no overlap": {"disable_overlap_schedule": True},
    "page size 1": {"page_size": 1},
    "no prefix cache": {"disable_radix_cache": True},
    "chunks of 16": {"page_size": 16, "chunked_prefill_size": 16},
    "two ranks": {"tp_size": 2},  # only the first rank samples
    "two stages": {"pp_size": 2},
    "retracted": {"max_total_tokens": 288, "schedule_conservativeness": 0.0, "page_size": 16},
}


def allowed(output_ids: tuple[int, ...]) -> list[int]:
    """Return about a fifth of the vocabulary, which depends on the last token. Runs of three or more tokens are
    forced.
    """
    last = output_ids[-1] if output_ids else 1
    if len(output_ids) % 8 in (0, 1, 5, 6, 7):
        return [(last * 5 + 11) % VOCAB]
    return [i for i in range(VOCAB) if (i * 7 + last * 3 + len(output_ids)) % 5 == 0]


def forced(output_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return up to six forced tokens after these tokens."""
    run: tuple[int, ...] = ()
    while len(run) < 6 and len(found := allowed(output_ids + run)) == 1:
        run += (found[0],)
    return run


@cache
def masked_reference(number: int) -> list[int]:
    """Return the greedy answer of transformers that uses only allowed tokens."""
    prompt, model = prompts()[number], _model()

    def tokens(_: int, ids: torch.Tensor) -> list[int]:
        return allowed(tuple(ids[len(prompt) :].tolist()))

    return model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        max_new_tokens=NUM_NEW,
        eos_token_id=None,
        pad_token_id=0,
        prefix_allowed_tokens_fn=tokens,
    )[0, len(prompt) :].tolist()


@cache
def _model() -> Any:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(model_path(FAMILY), dtype=torch.float32)


class ThreadedMasks:
    """Masks that a thread computes, like those of a grammar."""

    def __init__(self, threads: ThreadPoolExecutor, allowed: Callable[[tuple[int, ...]], list[int]]) -> None:
        self._threads = threads
        self._allowed = allowed

    def host_data_after(self, choice: int, output: Output, data: HostData) -> None:
        self._threads.submit(self._compute, output.output_ids, data)

    def _compute(self, output_ids: tuple[int, ...], data: HostData) -> None:
        data.give(bitmask(self._allowed(output_ids), VOCAB), forced(output_ids))


def request(number: int, constraint: Constraint | None = None, **sampling: Any) -> Request:
    params = {"temperature": 0.0, "max_new_tokens": NUM_NEW, "ignore_eos": True} | sampling
    return Request(ids=tuple(prompts()[number]), sampling=SamplingParams(**params), constraint=constraint)


async def answer(core: EngineCore, asked: Request) -> list[Chunk]:
    return await core.submit(asked).whole()


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.ids]


def awaited(core: EngineCore) -> list[HostData]:
    """Wait for the host data without which rows are in no step."""
    return [data for actor in core._scheduler.alive for data in actor.scheduler.awaited]


@pytest.fixture(autouse=True)
def always_appended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forced tokens are always appended, even if sampling them would be faster, as with this small model."""
    monkeypatch.setattr(fast_forward, "MIN_ROW_S", 0.0)


@asynccontextmanager
async def running(**options: Any) -> AsyncIterator[EngineCore]:
    """Run an engine, and check at the end that all pages are accounted for."""
    async with Engine(model_path(FAMILY), skip_tokenizer_init=True, random_seed=1, **options) as engine:
        yield engine.core
        status = engine.status()
        assert (status.num_running, status.num_waiting, status.num_used_pages) == (0, 0, 0)
        engine.core.check()


@pytest.mark.parametrize("way", WAYS)
async def test_masked_rows_give_the_reference_and_others_what_they_give_without_them(way: str):
    with ThreadPoolExecutor(1) as threads:
        masks = ThreadedMasks(threads, allowed)
        async with running(**WAYS[way]) as core:
            found = await asyncio.gather(*(answer(core, request(n, masks if n in MASKED else None)) for n in range(20)))
            # without overlap, masks come too late to force tokens
            assert core.status().num_forced > 0 or way == "no overlap"
    for number, chunks in enumerate(found):
        expected = masked_reference(number) if number in MASKED else reference(FAMILY)[number]
        assert ids_of(chunks) == expected, number


@pytest.mark.parametrize("way", ["overlap", "no overlap"])
@pytest.mark.parametrize("held_at", [0, 3])
async def test_a_slow_mask_stops_only_its_own_row(way: str, held_at: int):
    masks = LateHostData(VOCAB, allowed, is_held=lambda output_ids: len(output_ids) == held_at)
    async with running(**WAYS[way]) as core:
        slow = core.submit(request(3, masks))
        other = core.submit(request(7, max_new_tokens=200))
        received: list[int] = []
        async for chunks in other.chunks():
            received += ids_of(list(chunks))
            if len(received) >= 100 and masks.num_held:  # the slow row waits during many steps
                masks.is_held = lambda output_ids: False
                masks.deliver()
        assert len(received) == 200
        assert received[:NUM_NEW] == reference(FAMILY)[7]
        assert ids_of(await slow.whole()) == masked_reference(3)


async def test_an_engine_that_only_waits_for_a_mask_rests_until_it_comes():
    masks = LateHostData(VOCAB, allowed, is_held=lambda output_ids: len(output_ids) == 2)
    async with running() as core:
        slow = core.submit(request(3, masks))
        while not (masks.num_held and awaited(core)):
            await asyncio.sleep(0)
        steps = -1
        while steps != core.status().num_steps:  # waits for the steps in flight
            steps = core.status().num_steps
            for _ in range(5000):
                await asyncio.sleep(0)
        threading.Thread(target=masks.deliver_all).start()
        assert ids_of(await slow.whole()) == masked_reference(3)
        assert max(masks.asked, key=masks.asked.count) == masks.asked[0]
        assert len(masks.asked) == NUM_NEW  # one call per token


async def test_a_mask_without_tokens_ends_its_request_with_an_error_and_no_other():
    def until_two(output_ids: tuple[int, ...]) -> list[int]:
        return allowed(output_ids) if len(output_ids) < 2 else []

    async with running() as core:
        masks = LateHostData(VOCAB, until_two)
        failed, other = await asyncio.gather(answer(core, request(3, masks)), answer(core, request(7)))
    assert ids_of(failed) == masked_reference(3)[:2]
    finish = failed[-1].finish
    assert finish is not None
    assert finish.kind == "abort"
    assert "constraint" in (finish.message or "")
    assert ids_of(other) == reference(FAMILY)[7]


class Failing:
    """A constraint that raises, or fails its host data."""

    def __init__(self, *, at_once: bool) -> None:
        self._at_once = at_once

    def host_data_after(self, choice: int, output: Output, data: HostData) -> None:
        if self._at_once:
            raise ValueError("a secret of the grammar")
        data.fail()


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_constraint_that_raises_ends_its_request_and_no_other(at_once: bool):
    async with running() as core:
        failed, other = await asyncio.gather(
            answer(core, request(3, Failing(at_once=at_once))), answer(core, request(7))
        )
    finish = failed[-1].finish
    assert finish is not None
    assert finish.kind == "abort"
    assert "secret" not in (finish.message or "")
    assert ids_of(other) == reference(FAMILY)[7]


async def test_a_request_that_waits_for_a_mask_can_be_aborted():
    masks = LateHostData(VOCAB, allowed, is_held=lambda output_ids: len(output_ids) == 2)
    async with running() as core:
        asked = request(3, masks)
        slow = core.submit(asked)
        while not (masks.num_held and awaited(core)):
            await asyncio.sleep(0)
        core.abort(asked.id)
        chunks = await slow.whole()
        assert ids_of(chunks) == masked_reference(3)[:2]
        masks.deliver_all()
        assert ids_of(await answer(core, request(7))) == reference(FAMILY)[7]


async def test_choices_of_a_request_have_masks_of_their_own():
    masks = LateHostData(VOCAB, allowed, is_held=lambda output_ids: len(output_ids) == 4)
    sampling = {"temperature": 1.0, "seed": 5, "n": 3}
    async with running() as core:
        free = LateHostData(VOCAB, allowed)
        expected = await answer(core, request(5, free, **sampling))
        reply = core.submit(request(5, masks, **sampling))
        while masks.num_held < 3:
            await asyncio.sleep(0)
        masks.deliver_all()
        found = await reply.whole()
    for choice in range(3):
        outputs = [ids_of([c for c in chunks if c.index == choice]) for chunks in (expected, found)]
        assert outputs[0] == outputs[1]
        assert all(token in allowed(tuple(outputs[0][:i])) for i, token in enumerate(outputs[0]))
    assert {choice for choice, _ in masks.asked} == {0, 1, 2}
