"""How much of the time the device is busy with steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from time import perf_counter
from typing import NamedTuple, Protocol, Self

import torch

from runtime.worker.device_stream import Collect, Launch, Result


class TimedStep(NamedTuple):
    """One step on the device's own clock."""

    busy_s: float  # from its beginning to its end, waits of the device for launches in between included
    period_s: float  # from the beginning of the step before it to its own; 0 for the first


class Occupancy:
    """Times steps: on CUDA by events on the stream they run on, on a CPU by the clock of the device thread.

    What is timed begins when the device reaches the step and ends when its tokens are ready. Nothing is waited
    for but in the thread that waits for the step anyway. Within `forward()` that stream is the current one;
    None: the thread that launches a step also computes it.
    """

    def __init__(self, forward: Callable[[], AbstractContextManager[object]] | None) -> None:
        self.steps: list[TimedStep] = []  # in order; the collecting thread appends
        self._forward = forward
        self._last: _Mark | None = None

    def around(self, launch: Launch[Result]) -> Launch[Result]:
        """The same launch, timed."""

        def timed() -> Collect[Result]:
            begin = self._mark()
            collect = launch()
            launched = self._mark()

            def collected() -> Result:
                result = collect()
                self._note(begin, self._mark() if self._forward is None else launched)
                return result

            return collected

        return timed

    def shares(self) -> list[float]:
        """The part of the time from each step's beginning to that of the next one in which it ran."""
        return [min(1.0, step.busy_s / after.period_s) for step, after in zip(self.steps, self.steps[1:])]

    def _mark(self) -> _Mark:
        if self._forward is None:
            return HostMark()
        with self._forward():
            return DeviceMark()

    def _note(self, begin: _Mark, end: _Mark) -> None:
        end.wait()
        period_s = begin.since(self._last) if self._last is not None else 0.0
        self.steps.append(TimedStep(end.since(begin), period_s))
        self._last = begin


class _Mark(Protocol):
    """A moment in the device's work."""

    wait: Callable[[], None]  # until it has come

    def since(self, earlier: Self) -> float:
        """Seconds; both moments have come."""
        ...


class HostMark:
    """A moment of the calling thread."""

    def __init__(self) -> None:
        self._at_s = perf_counter()

    def wait(self) -> None:
        """It has come."""

    def since(self, earlier: HostMark) -> float:
        return self._at_s - earlier._at_s


class DeviceMark:
    """The moment at which the current CUDA stream gets here."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def since(self, earlier: DeviceMark) -> float:
        return earlier._event.elapsed_time(self._event) / 1e3
