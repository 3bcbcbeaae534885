"""Verbs about experts on ranks whose layers have none, for example the first stage of a pipeline."""

from __future__ import annotations

import numpy as np

from runtime.worker.device import CpuDevice
from runtime.worker.rank_state import RankState
from runtime.worker.verbs import run_verb


def test_a_rank_without_experts_takes_part_without_a_record():
    rank = RankState(CpuDevice(), leads=True)
    for verb in ("start_expert_record", "stop_expert_record", "dump_expert_record"):
        assert run_verb(rank, verb, {}) is None
    assert run_verb(rank, "await_expert_loads", {"num_steps": 3}) is None
    slots = np.zeros(4, np.int32)
    assert run_verb(rank, "place_experts", {"layers": [1], "slots": slots}) == {"moved": 0}
    assert run_verb(rank, "expert_places", {}) == {}
