"""Drafts are accepted as long as they equal the tokens chosen before them, in any mixture of rows."""

from __future__ import annotations

import numpy as np
import torch

from draft_steps import random_step
from runtime.worker.device import CpuDevice
from runtime.worker.drafts import accept_limits, draft_arrays, verify
from runtime.worker.host_data import NO_HOST_DATA
from runtime.worker.sampler import Sampled
from runtime.worker.step_outputs import copy_out


def test_rows_bring_what_plain_decoding_would():
    rng = np.random.default_rng(0)
    for _ in range(300):
        batch, ids, expected = random_step(rng)
        arrays = {name: torch.from_numpy(array) for name, array in draft_arrays(batch).items()}
        verified = verify(ids, arrays)
        sampled = Sampled(ids, torch.ones(len(ids), dtype=torch.bool), verified=verified)
        output = copy_out(CpuDevice(), batch, sampled)()
        assert output.tokens == expected
        lasts = dict(zip(arrays["draft_sequences"].tolist(), ids[verified.last].tolist(), strict=True))
        indices = batch.sequence_indices.tolist()
        assert lasts == {indices[row]: tokens[-1] for row, tokens in enumerate(expected) if tokens}


def test_a_row_ends_before_late_host_data():
    rng = np.random.default_rng(2)
    for _ in range(300):
        batch, ids, expected = random_step(rng)
        assert batch.sampling is not None
        row_of, late = batch.sampling.row_of.tolist(), {index for index in range(len(ids)) if rng.random() < 0.2}
        for row, tokens in enumerate(expected):
            places = [index for index, owner in enumerate(row_of) if owner == row]
            first_late = next((count for count, index in enumerate(places) if index in late), len(places))
            del tokens[first_late:]
        arrays = {name: torch.from_numpy(array) for name, array in draft_arrays(batch).items()}
        verified = verify(ids, arrays, accept_limits(batch, late))
        arrived = NO_HOST_DATA._replace(without_token=late)
        sampled = Sampled(ids, torch.ones(len(ids), dtype=torch.bool), host_data=arrived, verified=verified)
        assert copy_out(CpuDevice(), batch, sampled)().tokens == expected
        lasts = dict(zip(arrays["draft_sequences"].tolist(), ids[verified.last].tolist(), strict=True))
        indices = batch.sequence_indices.tolist()
        assert {indices[row]: tokens[-1] for row, tokens in enumerate(expected) if tokens}.items() <= lasts.items()


def test_values_that_are_not_finite_count_only_where_they_are_used():
    rng = np.random.default_rng(1)
    seen = set()
    for _ in range(200):
        batch, ids, expected = random_step(rng)
        assert batch.sampling is not None
        arrays = {name: torch.from_numpy(array) for name, array in draft_arrays(batch).items()}
        broken = int(rng.integers(len(ids)))
        sound = torch.arange(len(ids)) != broken
        output = copy_out(CpuDevice(), batch, Sampled(ids, sound, verified=verify(ids, arrays)))()
        row = int(batch.sampling.row_of[broken])
        is_used = broken - int(np.argmax(batch.sampling.row_of == row)) < len(expected[row])
        assert output.failed == ([row] if is_used else [])
        seen.add(is_used)
    assert seen == {True, False}
