"""Drafts are accepted as long as they equal the tokens chosen before them, in any mixture of rows."""

from __future__ import annotations

import numpy as np
import torch

from runtime.batch import UNKNOWN, Batch, Drafts, Ints, Sampling
from runtime.worker.device import CpuDevice
from runtime.worker.drafts import accept_limits, draft_arrays, last_choices
from runtime.worker.host_data import NO_HOST_DATA
from runtime.worker.sampler import Sampled
from runtime.worker.step_outputs import copy_out


def ints(values: list[int]) -> Ints:
    return np.array(values, np.int32)


def random_step(rng: np.random.Generator) -> tuple[Batch, torch.Tensor, list[list[int]]]:
    """Return a batch with drafts, the choices at its sampled positions, and the expected tokens of each row."""
    counts, token_ids, positions, row_of, drafts, choices, expected = [], [], [], [], {}, [], []
    num_rows = int(rng.integers(1, 6))
    for row in range(num_rows):
        kind = rng.integers(3) if row else 2  # 0: an incomplete prompt; 1: a single token or a prompt; 2: drafts
        count = int(rng.integers(1, 5)) + (kind == 2)
        ids = rng.integers(0, 3, count).tolist()
        own = rng.integers(0, 3, count).tolist()
        first = len(token_ids)
        expected.append([])
        if kind == 1:
            positions.append(first + count - 1)
            row_of.append(row)
            choices.append(own[-1])
            expected[-1] = [own[-1]]
        elif kind == 2:
            positions += range(first, first + count)
            row_of += [row] * count
            choices += own
            drafts[row] = count - 1
            for choice, draft in zip(own, [*ids[1:], UNKNOWN], strict=True):
                expected[-1].append(choice)
                if choice != draft:
                    break
        counts.append(count)
        token_ids += ids
    sampling = Sampling(
        ints(positions), ints(row_of), np.ones(len(row_of), np.bool_), np.zeros(len(row_of), np.float32)
    )
    batch = Batch(
        number=0,
        sequences=(None,) * num_rows,  # type: ignore[arg-type]
        starts=ints([0] * num_rows),
        counts=ints(counts),
        sequence_indices=ints(rng.permutation(num_rows).tolist()),
        token_ids=ints(token_ids),
        page_table=np.zeros((num_rows, 1), np.int32),
        sampling=sampling,
        drafts=Drafts(ints([*drafts]), ints([*drafts.values()])),
    )
    return batch, torch.tensor(choices), expected


def test_rows_bring_what_plain_decoding_would():
    rng = np.random.default_rng(0)
    for _ in range(300):
        batch, ids, expected = random_step(rng)
        arrays = {name: torch.from_numpy(array) for name, array in draft_arrays(batch).items()}
        accepted, last = last_choices(ids, arrays)
        sampled = Sampled(ids, torch.ones(len(ids), dtype=torch.bool), accepted=accepted)
        output = copy_out(CpuDevice(), batch, sampled)()
        assert output.tokens == expected
        lasts = dict(zip(arrays["draft_sequences"].tolist(), ids[last].tolist(), strict=True))
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
        accepted, last = last_choices(ids, arrays, accept_limits(batch, late))
        arrived = NO_HOST_DATA._replace(without_token=late)
        sampled = Sampled(ids, torch.ones(len(ids), dtype=torch.bool), host_data=arrived, accepted=accepted)
        assert copy_out(CpuDevice(), batch, sampled)().tokens == expected
        lasts = dict(zip(arrays["draft_sequences"].tolist(), ids[last].tolist(), strict=True))
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
        output = copy_out(CpuDevice(), batch, Sampled(ids, sound, accepted=last_choices(ids, arrays)[0]))()
        row = int(batch.sampling.row_of[broken])
        is_used = broken - int(np.argmax(batch.sampling.row_of == row)) < len(expected[row])
        assert output.failed == ([row] if is_used else [])
        seen.add(is_used)
    assert seen == {True, False}
