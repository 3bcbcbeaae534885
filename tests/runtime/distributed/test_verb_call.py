"""A verb reaches every rank in order with the steps. Its answers arrive together, or as one failure."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

import tiny_checkpoints
from runtime.batch import Batch
from runtime.distributed import group_runner
from runtime.distributed.group_runner import GroupRunner
from runtime.distributed.link import HEAD, Frame, decode
from runtime.distributed.verb_call import decode_payload, encode_answer, encode_call, encode_refusal
from runtime.distributed.worker_group import WorkerGroup
from runtime.errors import CheckpointError, EngineClosed, InvalidRequest, WorkerFailed
from runtime.mesh.mesh import Mesh
from runtime.mesh.rank_info import RankInfo
from serve import Engine


def sent(content: bytes) -> Frame:
    _, text_length = HEAD.unpack_from(content)
    return decode(bytearray(content[HEAD.size :]), text_length)


class OtherRank:
    """A worker process whose answers the test provides."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.received: list[Frame] = []
        self.messages: asyncio.Queue[bytes] = asyncio.Queue()

    def send(self, frame: bytes) -> None:
        self.received.append(sent(frame))

    async def watch(self, take: Any) -> None:
        while True:
            take(self.rank, sent(await self.messages.get()))

    def kill(self) -> None:
        """Do nothing: there is no process."""

    def close_link(self) -> None:
        """Do nothing: there is no link."""

    def reap(self) -> None:
        """Do nothing: there is no process."""


class OwnRank:
    """The runner of rank 0. The test provides its answers, and its steps never end."""

    def __init__(self) -> None:
        self.calls: list[asyncio.Future[list[Any]]] = []
        self.num_unfinished = 0

    def launch(self, batch: Batch) -> asyncio.Future[Any]:
        self.num_unfinished += 1
        return asyncio.get_running_loop().create_future()

    def finish_oldest(self) -> None:
        self.num_unfinished -= 1

    def call(self, verb: str, payload: Mapping[str, Any]) -> asyncio.Future[list[Any]]:
        self.calls.append(asyncio.get_running_loop().create_future())
        return self.calls[-1]

    def close(self) -> None:
        """Do nothing: there is no thread."""


def leading(**sizes: Any) -> tuple[GroupRunner, OwnRank, list[OtherRank]]:
    info = RankInfo(**(sizes or {"tp_size": 3}))
    group, own = WorkerGroup(), OwnRank()
    others = [OtherRank(rank) for rank in range(1, info.world_size)]
    group.workers = others  # type: ignore[assignment]
    stand_in: Any = own
    return GroupRunner(stand_in, group, Mesh(info, torch.device("cpu"))), own, others


async def soon(future: asyncio.Future[Any]) -> Any:
    return await asyncio.wait_for(asyncio.shield(future), 10)


def number_of(rank: OtherRank) -> int:
    return rank.received[-1].body["call"]


async def test_the_answers_of_all_ranks_come_in_their_order():
    runner, own, others = leading()
    watching = asyncio.create_task(runner.watch())
    calls = [runner.call("count", {"from": first}) for first in (1, 2)]
    assert [rank.received[1].body["payload"] for rank in others] == [{"from": 2}] * 2
    for rank in reversed(others):
        for frame in rank.received[::-1]:  # the second call is answered before the first
            rank.messages.put_nowait(encode_answer(frame.body["call"], [rank.rank, frame.body["payload"]]))
    for each in own.calls:
        each.set_result(["own"])
    for first, call in zip((1, 2), calls, strict=True):
        assert await soon(call) == ["own", [1, {"from": first}], [2, {"from": first}]]
    watching.cancel()


@pytest.mark.parametrize("refusing", [(0,), (1,), (0, 2), (2,)])
async def test_one_refusal_is_the_answer_and_the_ranks_go_on(refusing: tuple[int, ...]):
    runner, own, others = leading()
    watching = asyncio.create_task(runner.watch())
    call = runner.call("load", {})
    for rank in others:
        number = number_of(rank)
        refusal = encode_refusal(number, CheckpointError(f"rank {rank.rank}"))
        rank.messages.put_nowait(refusal if rank.rank in refusing else encode_answer(number, True))
    if 0 in refusing:
        own.calls[0].set_exception(CheckpointError("rank 0"))
    else:
        own.calls[0].set_result([True])
    with pytest.raises(CheckpointError, match=f"rank {refusing[0]}"):
        await soon(call)
    again = runner.call("load", {})
    for rank in others:
        rank.messages.put_nowait(encode_answer(number_of(rank), rank.rank))
    own.calls[1].set_result([0])
    assert await soon(again) == [0, 1, 2]
    assert not watching.done()
    watching.cancel()


async def test_an_error_of_rank_0_is_the_end_of_the_group(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(group_runner, "FIND_FAILED_RANK_S", 0.0)
    runner, own, _ = leading()
    watching = asyncio.create_task(runner.watch())
    call = runner.call("load", {})
    own.calls[0].set_exception(ValueError("a bad kernel"))
    for future in (call, watching):
        with pytest.raises(WorkerFailed, match="Rank 0 .* between two steps") as caught:
            await soon(future)
        assert isinstance(caught.value.__cause__, ValueError)


async def test_a_call_that_nobody_can_answer_any_more_fails():
    runner, _, _ = leading()
    call = runner.call("load", {})
    closing = threading.Thread(target=runner.close)
    closing.start()
    with pytest.raises(EngineClosed):
        await soon(call)
    closing.join()


async def test_in_a_pipeline_steps_that_only_began_end_before_the_verb():
    runner, own, [second, *_] = leading(tp_size=2, pp_size=2)
    own.num_unfinished = 2
    runner.call("count", {})
    assert [next(iter(frame.body)) for frame in second.received] == ["end", "end", "call"]
    assert own.num_unfinished == 0
    runner.finish_oldest()  # the scheduler requests the end of a step that has already ended
    assert len(second.received) == 3


def test_payloads_are_json_and_arrays():
    payload = {"name": "weights", "sizes": [1, 2], "ids": np.arange(6, dtype=np.int32).reshape(2, 3)}
    found = decode_payload(sent(encode_call(7, "load", payload)))
    assert np.array_equal(found.pop("ids"), payload.pop("ids"))
    assert found == payload
    for wrong in (object(), np.zeros(2, np.float32)):
        with pytest.raises(TypeError):
            encode_call(7, "load", {"thing": wrong})


@pytest.mark.parametrize("sizes", [{}, {"tp_size": 2}, {"pp_size": 2}], ids=["alone", "tp", "pp"])
async def test_a_verb_that_does_not_exist_is_refused_and_tokens_are_as_before(sizes: dict[str, int]):
    path = tiny_checkpoints.cached("llama", vocab_size=131, max_position_embeddings=512)
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    options: dict[str, Any] = {"skip_tokenizer_init": True, "random_seed": 1, **sizes}
    async with Engine(path, **options) as engine:
        [runner] = engine.core.runners
        prompts = [[5, 6, 7], [9, 8, 7, 6]]
        before = await engine.generate(input_ids=prompts, sampling_params=sampling)
        running = asyncio.create_task(engine.generate(input_ids=prompts, sampling_params=sampling))
        while not running.done():
            with pytest.raises(InvalidRequest, match="verb dance is unknown"):
                await soon(runner.call("dance", {}))
        for one, other in zip(before, await running, strict=True):
            assert one["output_ids"] == other["output_ids"]
