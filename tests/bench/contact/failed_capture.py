"""Force captures of CUDA graphs to fail, watch the memory, and check that later uploads and captures work."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.gpu.figure import Figure, document_of, line_of
from runtime.errors import EngineFailure
from runtime.worker.device import Device, open_device
from serve.bench import report

MIB = 2**20
ATTEMPTS = 20  # failed captures of each kind
SIDE = 2048  # a failed capture allocates two float32 matrices of this size, 32 MiB
SMALL_SIDE = 16
UPLOADS = 64
SLACK = 4  # number of matrices by which the reserved memory may differ, because the allocator keeps free blocks


class Memory(NamedTuple):
    """Bytes of a GPU that tensors use, and that the allocator holds. Both are 0 on a CPU."""

    used: int
    held: int


def main(argv: Sequence[str]) -> int:
    """Print and write the figures. Raises `EngineFailure` if failed captures keep memory or break later operations."""
    parser = argparse.ArgumentParser(prog="bench.contact.failed_capture")
    parser.add_argument("--device", required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--output-file")
    options = parser.parse_args(argv)
    side = SMALL_SIDE if options.small else SIDE
    with torch.inference_mode():
        rows, faults = watched(_device(options.device), side)
    for row in rows:
        report.say(line_of(row))
    if options.output_file:
        report.write(options.output_file, report.document("failed-capture", vars(options), {"rows": document_of(rows)}))
    if faults:
        raise EngineFailure(" ".join(faults))
    return 0


def _device(name: str) -> Device:
    """Return the device. "cpu" selects a fake that runs operations late, like a GPU, and forbids waits in captures."""
    if name == "cpu":
        from fake_device import LateDevice

        return LateDevice(Random(0), haste=1.0)
    return open_device(torch.device(name))


def watched(
    device: Device, side: int, memory: Callable[[], Memory] | None = None
) -> tuple[list[Figure], Sequence[str]]:
    """Return the memory that failed captures, and the uploads after them, leave allocated; and the faults found."""
    read = memory or (lambda: _memory(device))
    matrix_bytes = 4 * side * side
    with device.forward():
        x = torch.zeros(side, side, device=device.torch_device) + 1
    rows, faults = [], []
    for kind, fail in FAILURES.items():
        _attempt(device, x, fail)  # cuBLAS allocates its workspace
        first = read()
        for _ in range(ATTEMPTS):
            _attempt(device, x, fail)
        last = read()
        what = f"after {ATTEMPTS} captures that fail ({kind})"
        rows += [
            Figure(f"memory of tensors {what}", "-", _mib(last.used, first.used), "MiB"),
            Figure(f"memory of the allocator {what}", "-", _mib(last.held, first.held), "MiB"),
        ]
        if last.used > first.used:
            faults.append(f"Captures that fail ({kind}) keep tensors: {last.used - first.used} bytes.")
        if last.held > first.held + SLACK * matrix_bytes:
            faults.append(f"Captures that fail ({kind}) hold memory: {last.held - first.held} bytes.")
    before, after = read(), _uploads(device, matrix_bytes, read)
    rows.append(Figure(f"memory of the allocator after {UPLOADS} uploads", "-", _mib(after.held, before.held), "MiB"))
    if after.held > before.held + SLACK * matrix_bytes:
        faults.append(f"Blocks of uploads are not used again: {after.held - before.held} bytes.")
    if not _replays(device, x):
        faults.append("A graph that is captured after failures computes wrong values.")
    return rows, faults


def _attempt(device: Device, x: Tensor, fail: Callable[[Tensor], Any]) -> None:
    """Upload a tensor as a step does, then run a capture that fails."""

    def run() -> Tensor:
        product = x @ x
        fail(product)
        return product

    uploaded, done = device.upload(torch.ones(x.numel(), dtype=torch.uint8))
    done.wait()
    del uploaded
    try:
        device.capture(run)
    except (RuntimeError, AssertionError, ArithmeticError):
        return
    raise EngineFailure("A capture that must fail did not fail.")


def _uploads(device: Device, num_bytes: int, read: Callable[[], Memory]) -> Memory:
    for _ in range(UPLOADS):
        uploaded, done = device.upload(torch.zeros(num_bytes, dtype=torch.uint8))
        done.wait()
        del uploaded
    return read()


def _replays(device: Device, x: Tensor) -> bool:
    """Return whether a replay reads its input's contents at the time of the replay."""
    graph, out = device.capture(lambda: x @ x + 1)
    with device.forward():
        x.fill_(2)
        graph.replay()
        ends = torch.stack([out.amin(), out.amax()])
    [host], done = device.download([ends])
    done.wait()
    return host.tolist() == [4 * len(x) + 1] * 2


def _wait_for_the_device(product: Tensor) -> None:
    product.sum().item()


def _divide_by_zero(product: Tensor) -> None:
    _ = len(product) // 0


FAILURES: dict[str, Callable[[Tensor], None]] = {
    "an error in Python": _divide_by_zero,
    "the host waits for the device": _wait_for_the_device,
}


def _memory(device: Device) -> Memory:
    if device.torch_device.type != "cuda":
        return Memory(0, 0)
    gc.collect()
    torch.cuda.synchronize(device.torch_device)
    return Memory(torch.cuda.memory_allocated(), torch.cuda.memory_reserved())


def _mib(after: int, before: int) -> float:
    return (after - before) / MIB


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
