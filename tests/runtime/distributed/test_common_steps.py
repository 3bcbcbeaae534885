"""Replicas take common steps: busy ones stay together, and idle ones do not hold others up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from runtime.batch import Batch, StepOutput
from runtime.distributed.common_steps import TURNS, CommonSteps


class Joint:
    """Records the steps, and ends them when told."""

    kernels_description = ""

    def __init__(self) -> None:
        self.steps: list[list[Any]] = []
        self.results: list[asyncio.Future[list[StepOutput | None]]] = []
        self.calls: list[tuple[str, range | None, int]] = []
        self.num_closed = 0

    def launch_together(self, batches: Sequence[Batch | None]) -> asyncio.Future[list[StepOutput | None]]:
        self.steps.append([*batches])
        self.results.append(asyncio.get_running_loop().create_future())
        return self.results[-1]

    def end(self, step: int) -> None:
        self.results[step].set_result([None if batch is None else cast(Any, batch) for batch in self.steps[step]])

    def call(self, verb: str, payload: Mapping[str, Any], ranks: range | None = None) -> asyncio.Future[list[Any]]:
        self.calls.append((verb, ranks, len(self.steps)))
        return asyncio.get_running_loop().create_future()

    async def watch(self) -> None: ...

    def close(self) -> None:
        self.num_closed += 1


def make(num_replicas: int = 2, depth: int = 2) -> tuple[Joint, CommonSteps]:
    joint = Joint()
    return joint, CommonSteps(joint, num_replicas, 2, depth)


def launch(steps: CommonSteps, replica: int, name: str) -> asyncio.Future[Any]:
    return steps.replicas[replica].launch(cast(Any, name))


async def turns(count: int = TURNS + 1) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_batches_launched_together_share_a_step():
    joint, steps = make()
    first, second = launch(steps, 0, "a"), launch(steps, 1, "b")
    assert joint.steps == [["a", "b"]]
    joint.end(0)
    assert (await first, await second) == ("a", "b")


async def test_an_idle_replica_delays_a_step_by_some_turns_only():
    joint, steps = make()
    launch(steps, 1, "a")
    assert joint.steps == []
    await turns()
    assert joint.steps == [[None, "a"]]
    launch(steps, 1, "b")  # the only busy replica: no other one is awaited while a step is in flight
    assert joint.steps[1:] == [[None, "b"]]
    launch(steps, 1, "c")
    assert len(joint.steps) == 2
    joint.end(0)
    await turns()
    assert joint.steps[2:] == [[None, "c"]]


async def test_a_replica_that_becomes_busy_joins_the_next_step_of_the_other():
    joint, steps = make()
    launch(steps, 0, "a1")
    await turns()
    launch(steps, 1, "b1")
    await turns()
    assert joint.steps == [["a1", None]]  # replica 0 will launch again
    launch(steps, 0, "a2")
    assert joint.steps[1:] == [["a2", "b1"]]


async def test_a_replica_that_stays_away_does_not_hold_up_the_other():
    joint, steps = make()
    launch(steps, 0, "a1")
    await turns()
    launch(steps, 1, "b1")
    joint.end(0)  # replica 0 has no further request
    await turns()
    assert joint.steps[1:] == [[None, "b1"]]


async def test_without_overlap_replicas_stay_together_although_they_launch_turns_apart():
    joint, steps = make(depth=1)

    async def replica(index: int, delay: int) -> None:
        for number in range(5):
            result = await launch(steps, index, f"{index}{number}")
            assert result == f"{index}{number}"
            await turns(delay)

    tasks = [asyncio.ensure_future(replica(index, delay)) for index, delay in ((0, 1), (1, 3))]
    for number in range(5):
        while len(joint.steps) <= number:
            await asyncio.sleep(0)
        joint.end(number)
    await asyncio.gather(*tasks)
    assert joint.steps == [[f"0{number}", f"1{number}"] for number in range(5)]


async def test_a_failed_step_fails_every_batch_in_it():
    joint, steps = make()
    first, second = launch(steps, 0, "a"), launch(steps, 1, "b")
    joint.results[0].set_exception(ValueError("broken"))
    for result in (first, second):
        with pytest.raises(ValueError, match="broken"):
            await result


async def test_a_verb_follows_the_launched_batches_and_reaches_the_replica_s_ranks():
    joint, steps = make()
    launch(steps, 1, "a")
    steps.replicas[1].call("copy_pages", {})
    steps.replicas[0].call("copy_pages", {})
    assert joint.calls == [("copy_pages", range(2, 4), 1), ("copy_pages", range(2), 1)]


async def test_the_runner_is_closed_once():
    joint, steps = make()
    for replica in steps.replicas:
        replica.close()
    assert joint.num_closed == 1
