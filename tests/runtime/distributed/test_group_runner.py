"""Batches reach a worker unchanged, and a failed step of any rank ends the whole group."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch

import fake_runner
from runtime.batch import (
    UNKNOWN,
    AdapterPlacement,
    Batch,
    Branches,
    Drafts,
    Ints,
    MediaSpan,
    PageCopy,
    PromptLogprobs,
    Sampling,
    StepOutput,
    StepStats,
)
from runtime.distributed import group_runner
from runtime.distributed.group_runner import GroupRunner, decode_batch, encode_batch
from runtime.distributed.link import HEAD, Frame, decode, encode
from runtime.distributed.worker_group import WorkerGroup
from runtime.errors import WorkerFailed
from runtime.mesh.mesh import Mesh
from runtime.mesh.rank_info import RankInfo
from runtime.request import LogprobParams


def sent(content: bytes) -> Frame:
    length, text_length = HEAD.unpack_from(content)
    assert len(content) == HEAD.size + length
    return decode(bytearray(content[HEAD.size :]), text_length)


def batches() -> list[Batch]:
    """Yield batches of prompts, of output tokens, and with logprobs of a prompt."""
    seen: list[Batch] = []
    drive = fake_runner.Drive(watch=seen.append)
    drive.add(fake_runner.make_sequence(range(3, 12)), fake_runner.make_sequence(range(5, 9)))
    drive.run()
    drive.add(fake_runner.make_sequence(range(20, 32), logprobs=LogprobParams(start=2, top=1)))
    drive.run()
    return seen


def ints(*values: int) -> Ints:
    return np.array(values, np.int32)


# For every field, a value that differs from the default, so that a lost field is detected.
VALUES: dict[str, Any] = {
    "number": 7,
    "sequences": (object(),),
    "starts": ints(4, 0),
    "counts": ints(1, 3),
    "sequence_indices": ints(2, 5),
    "token_ids": ints(UNKNOWN, 11, 12, 13),
    "page_table": ints(3, 4, 5, 0).reshape(2, 2),
    "sampling": Sampling(ints(0, 3), ints(0, 1), greedy=np.ones(2, np.bool_), uniform=np.zeros(2, np.float32)),
    "prompt_logprobs": (PromptLogprobs(1, 1, ints(12, 13), LogprobParams(start=0)),),
    "embedding_rows": ints(1),
    "hidden_rows": (1,),
    "expert_rows": (1,),
    "row_values": {"adapter": ints(0, 2)},
    "kinds": {"state": {"spans": ints(1, 2, 0, 1).reshape(1, 4)}},
    "drafts": Drafts(ints(1), ints(1), Branches(ints(2), ints(1), ints(1))),
    "read_by_drafter": False,
    "unknown_starts": np.array([True, False]),
    "position_offsets": ints(*range(12)).reshape(3, 4),
    "mutual_spans": ints(0, 3, 9, 1, 2, 4).reshape(2, 3),
    "media": (
        MediaSpan(1, np.array([[0.5, -2.0]], np.float32)),
        MediaSpan(2, np.array([[1.0, 3.0], [4.0, 0.25]], np.float32)),
    ),
    "copies": (
        PageCopy("device", "host", ints(3, 4), ints(0, 9)),
        PageCopy("host", "device", ints(7), ints(3)),
    ),
    "adapters": (AdapterPlacement(2, 17), AdapterPlacement(1, 4)),
    "stats": StepStats(num_new=1),
}
# Only the scheduler or rank 0 reads these.
STAY_HERE = {"sequences", "stats", "hidden_rows", "expert_rows", "read_by_drafter"}
SAMPLING_TRAVELS = {"positions", "row_of"}  # only rank 0 chooses tokens


def same(left: object, right: object) -> bool:
    """Whether two values of a batch are equal: arrays including dtypes, mappings and tuples by their entries."""
    if isinstance(left, np.ndarray):
        equal = isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
        return bool(equal)
    if isinstance(left, Mapping):
        return (
            isinstance(right, Mapping)
            and left.keys() == right.keys()
            and all(same(value, right[key]) for key, value in left.items())
        )
    if isinstance(left, tuple):
        return (
            isinstance(right, tuple)
            and len(left) == len(right)
            and all(same(*each) for each in zip(left, right, strict=True))
        )
    if isinstance(left, Drafts):
        return isinstance(right, Drafts) and all(
            same(getattr(left, field.name), getattr(right, field.name)) for field in fields(Drafts)
        )
    return left == right


def test_every_field_of_a_batch_arrives():
    assert {field.name for field in fields(Batch)} == VALUES.keys(), "give the new field a value here"
    batch = Batch(**VALUES)
    copy = decode_batch(sent(encode_batch(batch)))
    for name in VALUES.keys() - STAY_HERE - {"sampling", "prompt_logprobs"}:
        default = next(field.default for field in fields(Batch) if field.name == name)
        assert not same(getattr(batch, name), default), f"{name} has its default value here"
        assert same(getattr(batch, name), getattr(copy, name)), name
    assert batch.sampling is not None
    assert copy.sampling is not None
    for name in SAMPLING_TRAVELS:
        assert same(getattr(batch.sampling, name), getattr(copy.sampling, name)), name
    for mine, yours in zip(batch.prompt_logprobs, copy.prompt_logprobs, strict=True):
        assert (mine.row, mine.offset, len(mine.targets)) == (yours.row, yours.offset, len(yours.targets))


def test_batches_of_a_scheduler_arrive():
    for batch in batches():
        copy = decode_batch(sent(encode_batch(batch)))
        for name in VALUES.keys() - STAY_HERE - {"sampling", "prompt_logprobs"}:
            assert same(getattr(batch, name), getattr(copy, name)), name
        assert (copy.sampling is None) == (batch.sampling is None)
        assert len(copy.prompt_logprobs) == len(batch.prompt_logprobs)


def test_empty_arrays_and_sets_arrive():
    frame = sent(encode({"ids": frozenset({3, 1})}, {"none": np.zeros((0, 4), np.int32)}))
    assert frame.body == {"ids": [1, 3]}
    assert frame.arrays["none"].shape == (0, 4)


def test_objects_do_not_travel():
    with pytest.raises(TypeError):
        encode({"thing": object()})


class OwnRank:
    """The runner of rank 0. The test decides how its steps end."""

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
