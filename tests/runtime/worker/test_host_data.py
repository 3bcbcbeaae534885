"""Sampling waits a limited time for host data."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from draft_steps import random_step
from runtime.constraint import HostData
from runtime.worker import host_data
from runtime.worker.device import CpuDevice
from runtime.worker.host_data import MAX_PATIENCE_S, HostDataGate


class Clock:
    """Time that passes only in waits."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def set(self) -> None: ...

    def wait(self, timeout_s: float) -> None:
        self.now_s += timeout_s


def test_late_masks_after_drafts_are_awaited_no_longer_than_other_masks(monkeypatch: pytest.MonkeyPatch):
    clock = Clock()
    monkeypatch.setattr(host_data, "perf_counter", clock)
    monkeypatch.setattr(host_data, "Event", lambda: clock)
    batch, ids, _ = random_step(np.random.default_rng(0))
    assert batch.sampling is not None
    assert len(ids) > len(batch.counts)  # rows have drafts
    late = {index: HostData() for index in range(len(ids))}
    arrived = HostDataGate(CpuDevice(), 8).arrived(replace(batch, sampling=replace(batch.sampling, host_data=late)))
    assert set(arrived.without_token) == set(late)
    assert clock.now_s - Clock.now_s <= MAX_PATIENCE_S + 1e-6
