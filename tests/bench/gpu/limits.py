"""What the device can do at most: bytes a second by large copies and sums, operations a second by a product."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

from bench.gpu.cost import Work

REPETITIONS = 5  # the fastest counts: a limit is not to be beaten
CALLS = 10  # between two looks at the clock
LARGE_BYTES, LARGE_SIDE = 4 * 2**30, 8192
SMALL_BYTES, SMALL_SIDE = 16 * 2**20, 256


class Limits(NamedTuple):
    """Measured on one device."""

    copied_bytes_per_s: float  # read and written
    summed_bytes_per_s: float  # read
    operations_per_s: float  # of a square product, a multiplication and an addition being two
    dtype: str

    @property
    def bytes_per_s(self) -> float:
        return max(self.copied_bytes_per_s, self.summed_bytes_per_s)

    def seconds(self, work: Work) -> float:
        """The shortest time in which the work can be done, reading and computing side by side."""
        return max(work.bytes / self.bytes_per_s, work.operations / self.operations_per_s)

    def bound(self, work: Work) -> str:
        """What that time is spent on: "bytes" or "operations"."""
        by_bytes = work.bytes / self.bytes_per_s >= work.operations / self.operations_per_s
        return "bytes" if by_bytes else "operations"


def measure_limits(device: str, dtype: str, *, small: bool) -> Limits:
    """Measure this device; `small` takes little memory and time, and says little."""
    import torch

    num_bytes, side = (SMALL_BYTES, SMALL_SIDE) if small else (LARGE_BYTES, LARGE_SIDE)
    copied, summed = _transfers(num_bytes, device)
    shape = (side, side)
    a, b = (torch.randn(shape, device=device).to(getattr(torch, dtype)) for _ in range(2))
    product = torch.empty_like(a)
    product_s = fastest(lambda: torch.mm(a, b, out=product), device)
    return Limits(copied, summed, 2 * side**3 / product_s, dtype)


def _transfers(num_bytes: int, device: str) -> tuple[float, float]:
    """Bytes per second of copying so many, each counted twice, and of summing them."""
    import torch

    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy_s = fastest(lambda: target.copy_(source), device)
    sum_s = fastest(lambda: source.sum(), device)
    return 2 * num_bytes / copy_s, num_bytes / sum_s


def fastest(call: Callable[[], object], device: str) -> float:
    """Seconds of one call, the device's queue kept full."""
    for _ in range(3):
        call()
    times = []
    for _ in range(REPETITIONS):
        _wait(device)
        began_s = perf_counter()
        for _ in range(CALLS):
            call()
        _wait(device)
        times.append((perf_counter() - began_s) / CALLS)
    return min(times)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        import torch

        torch.cuda.synchronize(device)
