"""Batches survive their way to a worker; what is not plain data does not travel."""

from __future__ import annotations

import numpy as np
import pytest

import fake_runner
from runtime.batch import Batch
from runtime.distributed.group_runner import decode_batch, encode_batch
from runtime.distributed.link import HEAD, Frame, decode, encode
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
        for name in ("starts", "counts", "slots", "token_ids", "page_table"):
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
