"""With --swap-space, retracted requests get their pages back: the same tokens, and almost no recomputation."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import anyio
import pytest

from greedy import GREEDY, model_path, prompts, reference
from ops.machine import Machine
from runtime.actors.status import Status
from runtime.config import Args
from runtime.config.resolve import resolve
from runtime.errors import ConfigurationError
from serve import Engine
from small_facts import FACTS

TIGHT = {
    "skip_tokenizer_init": True,
    "random_seed": 1,
    "max_total_tokens": 288,
    "schedule_conservativeness": 0.0,
    "page_size": 4,
}
ROOM = 0.01  # GiB, enough for many times the tokens of these tests


async def served(family: str, **options: Any) -> Status:
    """Serve all prompts in a pool that is too small for them, and check their tokens."""
    async with Engine(model_path(family), **TIGHT, **options) as engine:
        for _ in range(2):
            answers = await engine.generate(input_ids=prompts(), sampling_params=GREEDY)
            assert [answer["output_ids"] for answer in answers] == reference(family)
        status = engine.status()
        assert status.num_retracted > 0
        assert status.num_used_pages == 0
        return status


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"disable_radix_cache": True}),
        ("llama", {"disable_overlap_schedule": True}),
        ("llama", {"chunked_prefill_size": 16}),
        ("deepseek_v3", {}),  # keys and values share a tensor
        ("mistral", {"disable_hybrid_swa_memory": True}),  # sliding windows in a pool for all tokens
    ],
)
async def test_tokens_are_the_same_and_fewer_are_computed_twice(family: str, options: dict[str, Any]):
    without = await served(family, **options)
    swapping = await served(family, swap_space=ROOM, **options)
    assert (without.num_swapped_out, without.num_swapped_in) == (0, 0)
    assert swapping.num_swapped_out >= swapping.num_swapped_in > 0
    # A token may be pending when its request is retracted. All other tokens come back.
    assert swapping.num_recomputed <= 2 * swapping.num_retracted
    assert without.num_recomputed > 2 * swapping.num_recomputed


@pytest.mark.parametrize("parallel", [{"tp_size": 2}, pytest.param({"pp_size": 2}, marks=pytest.mark.slow)])
async def test_every_rank_moves_its_share(parallel: dict[str, int]):
    status = await served("llama", swap_space=ROOM, **parallel)
    assert status.num_swapped_in > 0


async def test_little_room_on_the_host_is_used_as_far_as_it_goes():
    # 2 layers with keys and values of 2 heads of 16 floats: 512 bytes per token, 2 KiB per page.
    status = await served("llama", swap_space=20 * 2048 / 2**30)
    assert status.num_swapped_in > 0
    assert status.num_recomputed > 2 * status.num_retracted


async def test_requests_that_leave_give_host_memory_back():
    async with Engine(model_path("llama"), **TIGHT, swap_space=ROOM) as engine:

        async def ask(number: int) -> None:
            with anyio.move_on_after(0.02 * number):
                await engine.generate(input_ids=prompts()[number], sampling_params=GREEDY)

        for _ in range(3):
            async with anyio.create_task_group() as clients:
                for number in range(20):
                    clients.start_soon(ask, number)
        answers = await engine.generate(input_ids=prompts(), sampling_params=GREEDY)
        assert [answer["output_ids"] for answer in answers] == reference("llama")
        engine.core.check()
        (actor,) = engine.core._scheduler.alive
        host = actor.scheduler._cache.host
        assert host is not None
        assert host.num_used == 0


@pytest.mark.parametrize(("family", "reason"), [("mistral", "windowed layers cannot be moved")])
async def test_caches_that_cannot_be_moved_are_computed_again_and_the_log_says_so(
    family: str, reason: str, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO, "penstock.core")
    status = await served(family, swap_space=ROOM)
    assert status.num_swapped_out == 0
    assert f"--swap-space: {reason}" in caplog.text


def test_the_plan_says_why_states_stay():
    hybrid = replace(FACTS, recurrent=True)
    plan = resolve(Args.of(model_path="/models/small", swap_space=1.0), Machine.named("cpu"), hybrid)
    assert plan.cache.swap_space_gib == 0
    assert "states of recurrent layers cannot be swapped" in plan.cache.reasons["swap_space_gib"]


def test_more_than_the_machine_has_is_refused():
    machine = Machine.named("cpu")
    args = Args.of(model_path="/models/small", swap_space=machine.total_bytes / 2**30, tp_size=2)
    with pytest.raises(ConfigurationError, match=r"--swap-space .* for 2 ranks, and this machine has"):
        resolve(args, machine, FACTS)
