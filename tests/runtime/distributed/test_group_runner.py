"""Batches survive their way to a worker, and a failed step of any rank is the end of all."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fake_runner
from runtime.batch import Batch, StepOutput
from runtime.distributed import group_runner
from runtime.distributed.group_runner import GroupRunner, decode_batch, encode_batch
from runtime.distributed.link import HEAD, Frame, decode, encode
from runtime.distributed.mesh import Mesh, RankInfo
from runtime.distributed.worker_group import WorkerGroup
from runtime.errors import WorkerFailed
from runtime.request import LogprobParams


def sent(content: bytes) -> Frame:
    length, text_length = HEAD.unpack_from(content)
    assert len(content) == HEAD.size + length
    return decode(bytearray(content[HEAD.size :]), text_length)


def batches() -> list[Batch]:
    """Of prompts, of output tokens, and with logprobs of a prompt."""
    seen: list[Batch] = []
    drive = fake_runner.Drive(watch=seen.append)
    drive.add(fake_runner.make_sequence(range(3, 12)), fake_runner.make_sequence(range(5, 9)))
    drive.run()
    drive.add(fake_runner.make_sequence(range(20, 32), logprobs=LogprobParams(start=2, top=1)))
    drive.run()
    return seen


def test_arrays_of_a_batch_arrive():
    for batch in batches():
        copy = decode_batch(sent(encode_batch(batch)))
        assert copy.number == batch.number
        for name in ("starts", "counts", "sequence_indices", "token_ids", "page_table"):
            assert np.array_equal(getattr(copy, name), getattr(batch, name)), name
        assert (copy.sampling is None) == (batch.sampling is None)
        if copy.sampling is not None and batch.sampling is not None:
            assert np.array_equal(copy.sampling.rows, batch.sampling.rows)


def test_wanted_prompt_positions_arrive():
    wanted = [batch for batch in batches() if batch.prompt_logprobs]
    assert wanted
    for batch in wanted:
        copy = decode_batch(sent(encode_batch(batch)))
        for mine, yours in zip(batch.prompt_logprobs, copy.prompt_logprobs, strict=True):
            assert (mine.row, mine.offset, len(mine.targets)) == (yours.row, yours.offset, len(yours.targets))


def test_empty_arrays_and_sets_arrive():
    frame = sent(encode({"ids": frozenset({3, 1})}, {"none": np.zeros((0, 4), np.int32)}))
    assert frame.body == {"ids": [1, 3]}
    assert frame.arrays["none"].shape == (0, 4)


def test_objects_do_not_travel():
    with pytest.raises(TypeError):
        encode({"thing": object()})


def test_rows_that_want_a_vector_arrive():
    batch = replace(batches()[0], embedding_rows=np.array([1], np.int32))
    copy = decode_batch(sent(encode_batch(batch)))
    assert copy.embedding_rows is not None
    assert copy.embedding_rows.tolist() == [1]


class OwnRank:
    """Rank 0's runner; a test says how its steps end."""

    kernels_description = ""

    def __init__(self) -> None:
        self.steps: list[asyncio.Future[StepOutput]] = []

    def launch(self, batch: Batch) -> asyncio.Future[StepOutput]:
        self.steps.append(asyncio.get_running_loop().create_future())
        return self.steps[-1]


def leading() -> tuple[GroupRunner, OwnRank, WorkerGroup]:
    group, own = WorkerGroup(), OwnRank()
    stand_in: Any = own
    return GroupRunner(stand_in, group, Mesh(RankInfo(tp_size=2), torch.device("cpu"))), own, group


async def test_outputs_of_rank_0_are_those_of_the_group():
    runner, own, _ = leading()
    step = runner.launch(batches()[0])
    output = StepOutput([[3]], [])
    own.steps[0].set_result(output)
    assert await asyncio.wait_for(asyncio.shield(step), 5) is output


async def test_a_step_that_only_rank_0_failed_is_the_end_with_its_reason(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(group_runner, "FIND_FAILED_RANK_S", 0.0)
    runner, own, _ = leading()
    step = runner.launch(batches()[0])
    own.steps[0].set_exception(ValueError("a bad kernel"))
    with pytest.raises(WorkerFailed, match="Rank 0") as caught:
        await asyncio.wait_for(asyncio.shield(step), 5)
    assert isinstance(caught.value.__cause__, ValueError)


@pytest.mark.parametrize("known_first", [True, False])
async def test_the_failed_rank_is_named_whether_its_end_is_known_before_the_step_fails_or_after(
    known_first: bool,
):
    runner, own, group = leading()
    began = time.monotonic()
    steps = [runner.launch(batch) for batch in batches()[:2]]
    ends = [
        lambda: group.failure.set_result(WorkerFailed("Rank 1 is gone.")),
        lambda: own.steps[0].set_exception(RuntimeError("connection reset")),
    ]
    for end in ends if known_first else ends[::-1]:
        end()
        await asyncio.sleep(0)
    own.steps[1].set_exception(RuntimeError("connection reset"))
    for step in steps:
        with pytest.raises(WorkerFailed, match="Rank 1 is gone"):
            await asyncio.wait_for(asyncio.shield(step), 5)
    assert time.monotonic() - began < group_runner.FIND_FAILED_RANK_S
