from __future__ import annotations

import numpy as np
import torch

from runtime.batch import Batch
from runtime.worker.device import CpuDevice
from runtime.worker.step_outputs import copy_out


def test_a_request_keeps_only_its_own_states_alive() -> None:
    counts = np.array([1, 5, 1, 2], np.int32)
    batch = Batch(
        number=0,
        sequences=(),
        starts=np.zeros(4, np.int32),
        counts=counts,
        sequence_indices=np.arange(4, dtype=np.int32),
        token_ids=np.zeros(9, np.int32),
        page_table=np.zeros((4, 1), np.int32),
        sampling=None,
        hidden_rows=(0, 2, 3),
    )
    states = torch.arange(8.0).reshape(4, 2)
    hidden = copy_out(CpuDevice(), batch, states=states)().hidden
    assert [(row, part.tolist()) for row, part in hidden] == [
        (0, [[0, 1]]),
        (2, [[2, 3]]),
        (3, [[4, 5], [6, 7]]),
    ]
    assert [np.shares_memory(part, states.numpy()) for _, part in hidden] == [False, False, True]
