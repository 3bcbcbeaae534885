"""Random batches with drafts, with the tokens that they must give."""

from __future__ import annotations

import numpy as np
import torch

from runtime.batch import UNKNOWN, Batch, Drafts, Ints, Sampling


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
