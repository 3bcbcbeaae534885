from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from runtime.worker import device as devices
from runtime.worker.device import CudaDevice

GPU = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Record every stream that is created, without a GPU."""
    made: list[object] = []

    def stream(device: torch.device) -> object:
        made.append(object())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    devices._idle_streams.cache_clear()
    yield made
    devices._idle_streams.cache_clear()  # no engine may get these fake streams


def test_one_engine_after_the_other_computes_on_the_same_streams(streams: list[object]) -> None:
    for _ in range(20):
        CudaDevice(GPU)
    assert len(streams) == 2


def test_engines_at_the_same_time_have_streams_of_their_own(streams: list[object]) -> None:
    living = [CudaDevice(GPU) for _ in range(3)]
    assert len(streams) == 6
    assert len({id(device._forward) for device in living}) == 3
    del living
    CudaDevice(GPU)
    assert len(streams) == 6
