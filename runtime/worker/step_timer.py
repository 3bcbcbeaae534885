"""Measures the share of time in which the device computes steps."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from time import perf_counter
from typing import NamedTuple, Protocol, Self

import torch

from runtime.worker.device import Enqueue, Read, Result


class TimedStep(NamedTuple):
    """The times of one step on the device's clock, in seconds."""

    busy_s: float  # from start to end; includes time in which the device waits for launches
    period_s: float  # from the start of the previous step to the start of this one; 0 for the first
    launch_s: float = 0.0  # time in which the device thread enqueued the step, on the host's clock


class StepTimer:
    """Measures the times of steps: on CUDA with events on the forward stream, on a CPU with the device thread's clock.

    A step starts when the device reaches it, and ends when its tokens are ready. Only the thread that reads results
    waits for events. `forward` is None on a CPU; on CUDA, `forward()` returns a context in which the forward stream is
    current.
    """

    def __init__(self, forward: Callable[[], AbstractContextManager[object]] | None) -> None:
        self.steps: list[TimedStep] = []  # in order; appended by the thread that reads results
        self._forward = forward
        self._last: _TimedEvent | None = None

    def around(self, enqueue: Enqueue[Result]) -> Enqueue[Result]:
        """Return a function that does the work of `enqueue` and measures its time."""

        def timed() -> Read[Result]:
            begin, began_s = self._now(), perf_counter()
            read = enqueue()
            enqueued, launch_s = self._now(), perf_counter() - began_s

            def timed_read() -> Result:
                result = read()
                self._note(begin, self._now() if self._forward is None else enqueued, launch_s)
                return result

            return timed_read

        return timed

    def shares(self) -> list[float]:
        """Return, for each step, its computing time as a share of the time from its start to the next start."""
        return [min(1.0, step.busy_s / after.period_s) for step, after in zip(self.steps, self.steps[1:])]

    def _now(self) -> _TimedEvent:
        if self._forward is None:
            return HostEvent()
        with self._forward():
            return CudaEvent()

    def _note(self, begin: _TimedEvent, end: _TimedEvent, launch_s: float) -> None:
        end.wait()
        period_s = begin.since(self._last) if self._last is not None else 0.0
        self.steps.append(TimedStep(end.since(begin), period_s, launch_s))
        self._last = begin


class _TimedEvent(Protocol):
    """A point in the device's work, with its time."""

    wait: Callable[[], None]  # blocks until the point is reached

    def since(self, earlier: Self) -> float:
        """Return the seconds between two points that have been reached."""
        ...


class HostEvent:
    """A point in the work of the calling thread."""

    def __init__(self) -> None:
        self._at_s = perf_counter()

    def wait(self) -> None:
        """Do nothing: the point is already reached."""

    def since(self, earlier: HostEvent) -> float:
        return self._at_s - earlier._at_s


class CudaEvent:
    """A point in the current CUDA stream."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def wait(self) -> None:
        self._event.synchronize()

    def since(self, earlier: CudaEvent) -> float:
        return earlier._event.elapsed_time(self._event) / 1e3
