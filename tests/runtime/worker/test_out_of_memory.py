from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import late_steps
from late_steps import Steps
from runtime.batch import Batch
from runtime.errors import OutOfMemory
from runtime.layers.forward_batch import ForwardBatch

PROMPTS = [([3 + i, 9, 4 + 3 * i, 7][: 1 + i % 4], 3 + i) for i in range(6)]


class Hungry:
    """A model that runs out of memory at its n-th call."""

    def __init__(self, eager: Any, when: int) -> None:
        self.eager, self.left = eager, when

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        self.left -= 1
        hidden = self.eager(batch)
        if self.left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")
        return hidden


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError])
def test_want_of_memory_has_its_own_error_and_what_is_unused_is_given_back(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
):
    steps = Steps(8, 2)
    released: list[bool] = []

    def fail(*arguments: Any) -> Any:
        raise kind("no memory")

    monkeypatch.setattr(steps.executor, "_begin", fail)
    monkeypatch.setattr(steps.device, "release_unused", lambda: released.append(True))
    none = np.zeros(0, np.int32)
    steps.launch(Batch(0, (), none, none, none, none, none.reshape(0, 1), sampling=None))
    with pytest.raises(OutOfMemory):
        steps.finish_oldest()
    assert released == [True]


@pytest.mark.parametrize("when", [1, 2, 5, 9])
def test_others_get_the_same_tokens_when_a_step_runs_out_of_memory(when: int):
    expected = late_steps.outputs(PROMPTS)

    def starve(steps: Steps) -> None:
        steps.use_forward(Hungry(steps.forward, when))

    found = late_steps.outputs(PROMPTS, change=starve)
    lost = [place for place, (one, other) in enumerate(zip(found, expected, strict=True)) if one != other]
    assert len(lost) == 1
    assert found[lost[0]] == expected[lost[0]][: len(found[lost[0]])]
