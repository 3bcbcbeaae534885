"""Several replicas share the requests. If one fails, only requests that have output are lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import fake_runner
import scripted_core
from runtime.actors import router
from runtime.actors.output_stream import OutputStream
from runtime.actors.replica import Replica
from runtime.actors.router import PREFIX_SLACK, ReplicaLoad, balance_policy
from runtime.errors import CheckpointError, EngineFailure, WorkerFailed
from runtime.request import Request
from runtime.sampling_params import SamplingParams

DEATH = WorkerFailed("Rank 1 (process 7) was killed by SIGKILL.")


def request(*ids: int, new: int = 8) -> Request:
    return Request(ids=ids, sampling=SamplingParams(max_new_tokens=new, seed=1))


def expected(sequence_ids: tuple[int, ...], new: int = 8) -> list[int]:
    drive = fake_runner.Drive(vocab_size=512)
    sequence = fake_runner.make_sequence(sequence_ids, max_new_tokens=new, seed=1)
    drive.add(sequence)
    drive.run()
    return drive.output(sequence)


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0)


async def whole(output: OutputStream) -> list[int]:
    [chunk] = await output.whole()
    return chunk.ids


async def test_requests_are_spread_and_answered():
    async with scripted_core.running_several(2) as (core, runners):
        prompts = [(3, 4, place) for place in range(10)]
        outputs = [core.submit(request(*prompt)) for prompt in prompts]
        found = await asyncio.gather(*map(whole, outputs))
        assert found == [expected(prompt) for prompt in prompts]
        assert all(runner.num_launched for runner in runners)
        await until(lambda: core.status().num_requests == 0)
        status = core.status()
        assert status.num_pages == 2 * scripted_core.NUM_PAGES
        assert status.num_used_pages == 0
        assert core.flush_cache()


async def test_prefix_goes_where_it_is_cached():
    async with scripted_core.running_several(2, balance="longest_prefix") as (core, runners):
        prompt = tuple(range(3, 40))
        await whole(core.submit(request(*prompt)))
        busy = [runner.num_launched > 0 for runner in runners]
        assert sorted(busy) == [False, True]
        for last in (50, 51, 52):
            [chunk] = await core.submit(request(*prompt, last)).whole()
            assert chunk.usage.cached == 36
        assert [runner.num_launched > 0 for runner in runners] == busy


async def test_dead_replica_keeps_what_was_not_begun_and_is_started_again():
    async with scripted_core.running_several(2) as (core, runners):
        runners[1].open.clear()
        outputs = [core.submit(request(3, 4, place)) for place in range(4)]
        await until(lambda: runners[1].num_launched)
        runners[1].die(DEATH)
        found = await asyncio.gather(*map(whole, outputs))
        assert found == [expected((3, 4, place)) for place in range(4)]
        await until(lambda: len(runners) == 3)
        assert runners[1].closed
        assert core.status().state == "ready"
        await asyncio.gather(*(whole(core.submit(request(9, 9, place))) for place in range(4)))
        assert runners[2].num_launched


async def test_a_replica_that_is_back_gets_its_share_of_those_that_wait():
    async with scripted_core.running_several(2, max_running=1) as (core, runners):
        for runner in runners:
            runner.open.clear()
        outputs = [core.submit(request(3, 4, place)) for place in range(13)]
        await until(lambda: all(runner.num_launched for runner in runners))
        core.abort(outputs[-1].request_id)
        runners[1].die(DEATH)
        await until(lambda: len(runners) == 3)
        runners[0].open.set()
        found = await asyncio.gather(*map(whole, outputs[:-1]))
        assert found == [expected((3, 4, place)) for place in range(12)]
        assert runners[2].num_launched >= 4 * 8  # of the twelve requests, with eight steps each
        core.check()


async def test_what_was_begun_fails_with_the_reason():
    async with scripted_core.running_several(2) as (core, runners):
        outputs = [core.submit(request(3, 4, place, new=200)) for place in range(2)]
        streams = [output.chunks() for output in outputs]
        for stream in streams:
            await anext(stream)
        runners[0].die(DEATH)
        with pytest.raises(WorkerFailed, match="Rank 1"):
            async for _ in streams[0]:
                pass
        assert await anext(streams[1])
        for stream in streams:
            await stream.aclose()


async def test_requests_wait_for_the_last_replica_to_come_back_and_can_be_aborted():
    async with scripted_core.running_several(2) as (core, runners):
        for runner in runners[:2]:
            runner.open.clear()
        outputs = [core.submit(request(3, 4, place)) for place in range(4)]
        await until(lambda: all(runner.num_launched for runner in runners))
        for runner in runners[:2]:
            runner.die(DEATH)
        core.abort(outputs[3].request_id)
        [chunk] = await outputs[3].whole()
        assert chunk.finish is not None
        assert chunk.finish.kind == "abort"
        found = await asyncio.gather(*map(whole, outputs[:3]))
        assert found == [expected((3, 4, place)) for place in range(3)]


async def test_hanging_replica_is_replaced():
    async with scripted_core.running_several(2, watchdog_timeout_s=0.05) as (core, runners):
        runners[0].open.clear()
        outputs = [core.submit(request(3, 4, place)) for place in range(4)]
        found = await asyncio.gather(*map(whole, outputs))
        assert found == [expected((3, 4, place)) for place in range(4)]
        await until(lambda: len(runners) == 3)


async def test_a_restart_that_fails_in_any_way_leaves_the_others_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(router, "RESTART_DELAY_S", 0.0)
    full = OSError("no space left on the device")
    async with scripted_core.running_several(2, restarts=0, failure=full) as (core, runners):
        runners[0].die(DEATH)
        await until(lambda: runners[0].closed)
        for place in range(4):
            assert await whole(core.submit(request(3, 4, place))) == expected((3, 4, place))
        assert core.status().state == "ready"
        assert core.status().num_pages == scripted_core.NUM_PAGES


async def test_a_replica_that_is_given_up_does_not_end_one_that_may_return(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(router, "RESTART_DELAY_S", 0.0)
    async with scripted_core.running_several(2, restarts=1) as (core, runners):
        may_start = asyncio.Event()
        actor: Any = core._scheduler
        start = actor._start_replica

        async def start_late(index: int) -> Replica:
            if index == 0:
                raise EngineFailure("Never again.")
            await may_start.wait()
            return await start(index)

        actor._start_replica = start_late
        for runner in list(runners):
            runner.die(DEATH)
        await until(lambda: actor._given_up == {0})
        output = core.submit(request(3, 4))
        may_start.set()
        assert await whole(output) == expected((3, 4))
        assert core.status().state == "ready"


async def test_a_replica_whose_adapters_cannot_be_restored_is_closed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(router, "RESTART_DELAY_S", 0.0)
    async with scripted_core.running_several(2, restarts=2) as (core, runners):

        async def refuse(runner: Any) -> None:
            raise CheckpointError("The files of the adapter changed.")

        with monkeypatch.context() as patch:
            patch.setattr(core.adapters, "restore", refuse)
            runners[0].die(DEATH)
            await until(lambda: len(runners) == 4 and all(runner.closed for runner in runners[2:]))
        assert not runners[1].closed
        assert await whole(core.submit(request(3, 4))) == expected((3, 4))


async def test_a_weight_update_reaches_a_replica_that_is_restoring_its_adapters(monkeypatch: pytest.MonkeyPatch):
    async with scripted_core.running_several(2, restarts=1) as (core, runners):
        restoring, restored = asyncio.Event(), asyncio.Event()

        async def restore(runner: Any) -> None:
            restoring.set()
            await restored.wait()

        async def update() -> int:
            async with core.weights._changing():
                return len(core.weights._actors)

        monkeypatch.setattr(core.adapters, "restore", restore)
        runners[0].die(DEATH)
        await restoring.wait()
        updating = asyncio.create_task(update())
        await asyncio.wait({updating}, timeout=0.02)
        restored.set()
        assert await updating == 2


async def test_engine_ends_when_no_replica_can_be_started(monkeypatch):
    monkeypatch.setattr(router, "RESTART_DELAY_S", 0.0)
    async with scripted_core.running_several(2, restarts=0) as (core, runners):
        for runner in runners:
            runner.open.clear()
        output = core.submit(request(3, 4))
        for runner in list(runners):
            runner.die(DEATH)
        with pytest.raises(EngineFailure, match="Rank 1"):
            await output.whole()
        await until(lambda: core.status().state == "failed")


def pick(method: str, *replicas: tuple[int, int, int]) -> int:
    return balance_policy(method)([ReplicaLoad(*replica) for replica in replicas])


def test_round_robin_takes_turns_whatever_they_hold():
    policy = balance_policy("round_robin")
    replicas = [ReplicaLoad(9, 9, 9), ReplicaLoad(0, 0, 0), ReplicaLoad(5, 5, 5)]
    assert [policy(replicas) for _ in range(5)] == [0, 1, 2, 0, 1]


@pytest.mark.parametrize(("method", "chosen"), [("shortest_queue", 1), ("minimum_tokens", 2), ("longest_prefix", 0)])
def test_each_method_looks_at_its_own_measure(method: str, chosen: int):
    assert pick(method, (4, 900, 64), (2, 500, 0), (3, 100, 16)) == chosen


def test_equal_queues_are_told_apart_by_tokens():
    assert pick("shortest_queue", (2, 50, 0), (2, 40, 0)) == 1
    assert pick("minimum_tokens", (2, 50, 0), (1, 50, 0)) == 1


def test_prefix_gives_way_to_a_replica_that_is_much_less_busy():
    assert pick("longest_prefix", (PREFIX_SLACK, 500, 64), (0, 0, 0)) == 0
    assert pick("longest_prefix", (PREFIX_SLACK + 1, 500, 64), (0, 0, 0)) == 1


def test_without_any_prefix_tokens_decide():
    assert pick("longest_prefix", (2, 50, 0), (9, 40, 0)) == 1
