"""Choices of experts are counted by the placement of their step, and a step copies nothing to the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from runtime.config.plan import ExpertPlan
from runtime.experts.placement import in_order, placed
from runtime.layers.expert_sharing import ExpertSharing
from runtime.mesh.axis import Axis
from runtime.mesh.rank_info import Coordinate
from runtime.worker.expert_recorder import ExpertRecorder

BATCH: Any = None  # only the mode "per_token" reads it


def recorder(sharing: ExpertSharing) -> ExpertRecorder:
    def mixture(layer: int) -> Any:
        return SimpleNamespace(num_experts=4, recorded=lambda count: sharing.remembered(layer, count))

    plan = cast(Any, ExpertPlan)(balance=True, balance_steps=3, record="stat", reasons={})
    return ExpertRecorder({2: mixture(2), 5: mixture(5)}, sharing, plan, 0, 6)


def test_loads_follow_the_placement_of_each_step(monkeypatch: pytest.MonkeyPatch):
    sharing = ExpertSharing(Axis("ep", Coordinate(0, 2, 0)), num_redundant=2, records=True)
    made = recorder(sharing)
    for layer in (2, 5):
        sharing.remember(layer, torch.tensor([[0, 5], [4, 1]]))  # slots; slots 4 and 5 hold experts 0 and 1
    assert in_order(4, 2, 2).experts == (0, 1, 2, 3, 0, 1)
    loads = made.when_due(3)
    made.note(BATCH, 2)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "tensor", None)
        made.note(BATCH, 2)
    sharing.place(5, placed((0, 1, 2, 3, 3, 2), 4, 2))
    made.note(BATCH, 2)
    assert loads.result(0)["loads"] == {"2": [6, 6, 0, 0], "5": [5, 5, 1, 1]}
    made.note(BATCH, 2)  # counted by nobody
    later = made.when_due(1)
    made.note(BATCH, 2)
    assert later.result(0)["loads"]["5"] == [1, 1, 1, 1]
    single = made.when_due(3, 2)
    for chosen in ([[0, 5]], [[2, 2]], [[3, 1]]):
        sharing.remember(2, torch.tensor(chosen))
        made.note(BATCH, 1)
    assert single.result(0)["loads"]["2"] == [[1, 1, 0, 0], [0, 1, 0, 1]]  # every second step
    waiting = made.when_due(2)
    made.close()
    assert waiting.result(0) is None
