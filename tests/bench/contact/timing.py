"""Time one call of a kernel on a device, eagerly or in a CUDA graph, and compare it with the device's limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from bench.gpu.figure import Failure, Figure
from bench.gpu.limits import Limits, Work, fastest
from runtime.worker.device import open_device

Call = Callable[[], object]
Row = Callable[[], Figure | Failure]


class Place(NamedTuple):
    """The device that is measured, and its limits. `small` selects a rehearsal with the smallest sizes."""

    device: str
    limits: Limits
    small: bool

    @property
    def on_gpu(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def kernels(self) -> str:
        """The backend file that is measured: Triton on a GPU, torch in a rehearsal."""
        return "with_triton" if self.on_gpu else "native"

    def draw(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Return normally distributed numbers on the device. They are the same in every run."""
        generator = torch.Generator(self.device).manual_seed(1)
        return (torch.randn(shape, generator=generator, device=self.device) * scale).to(dtype)


def measure(
    place: Place, what: str, shape: str, work: Work, make: Callable[[], Call], *, in_graph: bool = False
) -> Figure | Failure:
    """Return the time of one call of `make()`, or why it cannot be measured.

    With `in_graph`, a GPU replays a graph of the call, so that the time to launch its kernels does not count.
    """
    try:
        with torch.inference_mode():
            call = make()
            took_s = fastest(_captured(call, place.device) if in_graph and place.on_gpu else call, place.device)
    except Exception as why:  # kernels may raise any error of Triton, torch or CUDA; the next row is still measured
        return Failure(what, f"{type(why).__name__}: {why}")
    limit_us, bound = 1e6 * place.limits.seconds(work), place.limits.bound(work)
    return Figure(what, shape, 1e6 * took_s, "us", limit_us, bound, lower_is_better=True)


def _captured(call: Call, device: str) -> Call:
    call()  # compiles and loads the kernels, which is impossible during a capture
    graph, _ = open_device(torch.device(device)).capture(call)
    return graph.replay
