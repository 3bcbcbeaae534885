from __future__ import annotations

from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_device import LateDevice, LateEvent, Reach
from runtime.worker import device as devices
from runtime.worker.device import CudaDevice, Stream

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


class LateStreams:
    """Replaces torch's streams and events by those of a late device, which runs the streams in any allowed order."""

    def __init__(self, patch: pytest.MonkeyPatch, seed: int, lost: str = "") -> None:
        self.late = LateDevice(Random(seed))
        self._lost = lost
        self._names: Iterator[Stream] = iter(("forward", "copy"))
        patch.setattr(torch.cuda, "Stream", lambda device: self.stream(next(self._names)))
        patch.setattr(
            torch.cuda, "stream", lambda of: self.late.forward() if of.name == "forward" else self.late.copies()
        )
        patch.setattr(torch.cuda, "Event", self.event)

    def stream(self, name: Stream) -> Any:
        def wait(event: Any) -> None:
            if event.last is not None and name != self._lost:
                self.late.enqueue(name, event.last)

        return SimpleNamespace(name=name, wait_event=wait, wait_stream=lambda other: self.late.order(other.name, name))

    def event(self) -> Any:
        event = SimpleNamespace(last=None)

        def record(stream: Any) -> None:
            event.last = LateEvent(self.late)
            self.late.enqueue(stream.name, Reach(event.last))

        event.record, event.synchronize = record, lambda: event.last.wait()
        return event


def uploads(patch: pytest.MonkeyPatch, seed: int, lost: str = "") -> bool:
    """Return whether every upload arrived whole. `lost` is a stream that does not wait for events."""
    streams = LateStreams(patch, seed, lost)
    device = CudaDevice(torch.device("cpu"))
    expected, sums, hosts = [], [], []
    for number in range(40):
        host = torch.full((1 + number * 7 % 48,), number, dtype=torch.uint8)
        there, _ = device.upload(host)
        with device.forward():
            sums.append(there.sum())
        expected.append(int(host.sum()))
        hosts.append(host)
    streams.late.settle()
    return [int(each) for each in sums] == expected


def test_uploads_arrive_whole_in_any_order_of_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "STAGED_BYTES", 32)  # some uploads are larger
    for seed in range(4):
        devices._idle_streams.cache_clear()
        assert uploads(monkeypatch, seed)


@pytest.mark.parametrize("lost", ["forward", "copy"])
def test_a_stream_that_waits_for_no_event_is_noticed(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "STAGED_BYTES", 32)
    assert not uploads(monkeypatch, 0, lost)


def test_a_device_uses_the_same_buffers_for_all_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = LateStreams(monkeypatch, 0)
    device = CudaDevice(torch.device("cpu"))
    there: list[Tensor] = [device.upload(torch.ones(8, dtype=torch.uint8))[0] for _ in range(20)]
    streams.late.settle()
    assert len(device._staged) == devices.NUM_STAGED
    assert not {each.data_ptr() for each in there} & {buffer.data_ptr() for buffer, _ in device._staged}
    device.upload(torch.ones(8, dtype=torch.uint8))
    kept = [buffer.data_ptr() for buffer, _ in device._staged]
    del device
    again = CudaDevice(torch.device("cpu"))
    assert [buffer.data_ptr() for buffer, _ in again._staged] == kept


def test_buffers_from_a_step_take_uploads_outside_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory profile runs steps. Then page copies are measured, on the streams and buffers of its device."""
    streams = LateStreams(monkeypatch, 0)
    device = CudaDevice(torch.device("cpu"))
    with torch.inference_mode():
        device.upload(torch.ones(8, dtype=torch.uint8))
    there, _ = device.upload(torch.ones(8, dtype=torch.uint8))
    streams.late.settle()
    assert int(there.sum()) == 8
