"""The orders of the waiting queue, in a real engine that runs one sequence at a time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import tiny_checkpoints
from runtime.errors import InvalidRequest, Overloaded
from serve import Engine

SHORT, LONG = list(range(20, 36)), list(range(90, 122))  # prefixes of one and two pages, which are cached
PLAIN: dict[str, Any] = {"skip_tokenizer_init": True, "random_seed": 1, "max_running_requests": 1}
# Prompts and output lengths of requests that wait together, in order of arrival.
WAITING: list[tuple[list[int], int]] = [
    ([60, 61, 62], 4),
    ([*SHORT, 70], 8),
    ([*LONG, 80], 2),
    ([*SHORT, 71], 6),
    ([63], 12),
]
ORDERS = {
    "fcfs": [0, 1, 2, 3, 4],
    "lpm": [2, 1, 3, 0, 4],
    "lof": [4, 1, 3, 0, 2],
    # first the branch with two requests; then equal branches by arrival; then requests in no branch
    "dfs-weight": [1, 2, 3, 0, 4],
}


@pytest.fixture(scope="module")
def path() -> str:
    return tiny_checkpoints.cached("llama")


async def served(path: str, policy: str) -> tuple[list[int], list[list[int]]]:
    """Return the order in which waiting requests finish, and the tokens of each."""
    finished: list[int] = []
    async with Engine(path, **PLAIN, schedule_policy=policy) as engine:

        async def ask(index: int, prompt: list[int], length: int) -> list[int]:
            sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
            answer = await engine.generate(input_ids=prompt, sampling_params=sampling)
            finished.append(index)
            return answer["output_ids"]

        for known in (SHORT, LONG):
            await ask(-1, [*known, 99], 4)
        running = asyncio.create_task(ask(-1, [40, 41], 64))
        await asyncio.sleep(0)
        tokens = await asyncio.gather(*(ask(index, *each) for index, each in enumerate(WAITING)))
        await running
    return [index for index in finished if index >= 0], tokens


@pytest.mark.parametrize("policy", ORDERS)
async def test_the_policy_decides_who_is_next(path: str, policy: str):
    order, _ = await served(path, policy)
    assert order == ORDERS[policy]


@pytest.mark.parametrize("policy", ["lpm", "lof", "dfs-weight", "random"])
async def test_the_order_changes_no_tokens(path: str, policy: str):
    _, expected = await served(path, "fcfs")
    order, tokens = await served(path, policy)
    assert tokens == expected
    assert sorted(order) == [0, 1, 2, 3, 4]


async def test_random_is_no_order_of_arrival(path: str):
    order, _ = await served(path, "random")
    assert order != ORDERS["fcfs"]


async def test_priorities_go_before_the_order_of_arrival_and_displace(path: str):
    finished: list[int | None] = []
    priorities = {"enable_priority_scheduling": True, "max_queued_requests": 3}
    async with Engine(path, **PLAIN, **priorities) as engine:

        async def ask(priority: int | None, length: int = 4) -> list[int]:
            sampling = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
            answer = await engine.generate(
                input_ids=[*SHORT, 60 + (priority or 0)], sampling_params=sampling, priority=priority
            )
            finished.append(priority)
            return answer["output_ids"]

        alone = await ask(0, 64)
        running = asyncio.create_task(ask(0, 64))
        while not engine.status().num_running:
            await asyncio.sleep(0)
        waiting = [asyncio.create_task(ask(priority)) for priority in (None, 5, 9)]
        while engine.status().num_waiting < 3:
            await asyncio.sleep(0)
        with pytest.raises(Overloaded, match="queue is full"):
            await ask(None)
        waiting.append(asyncio.create_task(ask(20)))
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(answers[0], Overloaded)
        assert "higher priority" in answers[0].message
        assert await running == alone
        assert finished == [0, 20, 9, 5, 0]
        assert engine.status().num_retracted == 1
    async with Engine(path, **PLAIN) as engine:
        with pytest.raises(InvalidRequest, match="--enable-priority-scheduling"):
            await engine.generate(input_ids=[5], priority=1)
