"""The measured limits of the device, and the minimum bytes and operations of a workload.

Limits: bytes per second of large copies and sums, and operations per second of a matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from time import perf_counter
from typing import NamedTuple

from bench.checkpoints import Shape, parameter_sizes

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1}


class Work(NamedTuple):
    """Bytes that are read from the device's memory, and operations (multiplications and additions)."""

    bytes: float = 0.0
    operations: float = 0.0

    def plus(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.operations + other.operations)


class Job(NamedTuple):
    """One request: its input and output tokens. The first `shared` input tokens are common to its group."""

    input: int
    output: int
    shared: int = 0


class Cost:
    """The minimum cost of a model with this shape.

    Weights are read once per step. Keys and values are read once by every token that attends to them, and once for all
    running requests that share a prefix. Activations stay on the chip.
    """

    def __init__(self, shape: Shape, dtype: str, cache_dtype: str | None = None) -> None:
        """`cache_dtype` is the dtype of keys and values, if it differs from that of the model."""
        sizes = dict(parameter_sizes(shape))
        embedding = prod(sizes.pop("model.embed_tokens.weight"))
        head = embedding if shape.tied else prod(sizes.pop("lm_head.weight"))
        body = sum(prod(size) for size in sizes.values())
        self._matmul = sum(prod(size) for size in sizes.values() if len(size) == 2)
        self._head = head
        self._layers_width = shape.layers * shape.heads * shape.head_dim
        self.weight_bytes = (body + head) * BYTES[dtype]
        self.held_bytes = self.weight_bytes + (0 if shape.tied else embedding * BYTES[dtype])
        self.kv_token_bytes = 2 * shape.layers * shape.kv_heads * shape.head_dim * BYTES[cache_dtype or dtype]

    def decode(self, contexts: Iterable[float]) -> Work:
        """Return the cost of one decode step, in which each row attends to this number of tokens."""
        contexts = list(contexts)
        seen = sum(contexts)
        return Work(
            self.weight_bytes + seen * self.kv_token_bytes,
            2 * (self._matmul + self._head) * len(contexts) + 4 * self._layers_width * seen,
        )

    def prompt(self, tokens: int) -> Work:
        """Return the cost of a prompt up to its first token, in one step."""
        attended = tokens * (tokens + 1) / 2
        operations = 2 * self._matmul * tokens + 2 * self._head + 4 * self._layers_width * attended
        return Work(self.weight_bytes, operations)

    def all_at_once(self, jobs: Sequence[Job], groups: int = 0) -> Work:
        """Return the cost of all jobs in parallel, from the first step to the last token of the longest job.

        With `groups`, the jobs are divided into equal groups with a shared prefix. Each prefix is computed once and
        read once per step for the whole group.
        """
        steps = max(job.output for job in jobs)
        work = Work(bytes=float(steps * self.weight_bytes))
        for job in jobs:
            work = work.plus(self._own(job))
        if groups:
            first = jobs[0]
            computed, read = self._matmul * 2 * first.shared, first.shared * self.kv_token_bytes
            attended = 4 * self._layers_width * first.shared * (first.shared + 1) / 2
            work = work.plus(Work(groups * read * (first.output - 1), groups * (computed + attended)))
        return work

    def _own(self, job: Job) -> Work:
        """Return the cost of one job without the weights and the shared prefix."""
        last = job.input + job.output - 1  # number of computed tokens; the last token's KV is not needed
        steps = job.output - 1
        read = steps * (job.input - job.shared) + steps * (steps + 1) / 2
        attended = (last * (last + 1) - job.shared * (job.shared + 1)) / 2
        operations = 2 * self._matmul * (last - job.shared) + 2 * self._head * job.output
        return Work(read * self.kv_token_bytes, operations + 4 * self._layers_width * attended)


REPETITIONS = 5  # the fastest repetition counts, because a limit must not be exceeded
CALLS = 10  # calls between two readings of the clock
LARGE_BYTES, LARGE_SIDE = 4 * 2**30, 8192
SMALL_BYTES, SMALL_SIDE = 16 * 2**20, 256


class Limits(NamedTuple):
    """Limits measured on one device."""

    copied_bytes_per_s: float  # bytes read and written
    summed_bytes_per_s: float  # bytes read
    operations_per_s: float  # of a square matrix product; a multiplication and an addition are two operations
    dtype: str

    @property
    def bytes_per_s(self) -> float:
        return max(self.copied_bytes_per_s, self.summed_bytes_per_s)

    def seconds(self, work: Work) -> float:
        """Return the minimum time for the work, if reading and computing overlap completely."""
        return max(work.bytes / self.bytes_per_s, work.operations / self.operations_per_s)

    def bound(self, work: Work) -> str:
        """Return the resource that determines the time: "bytes" or "operations"."""
        by_bytes = work.bytes / self.bytes_per_s >= work.operations / self.operations_per_s
        return "bytes" if by_bytes else "operations"


def measure_limits(device: str, dtype: str, *, small: bool) -> Limits:
    """Measure this device. `small` takes little memory and time, but the result is not meaningful."""
    import torch

    num_bytes, side = (SMALL_BYTES, SMALL_SIDE) if small else (LARGE_BYTES, LARGE_SIDE)
    copied, summed = _transfers(num_bytes, device)
    shape = (side, side)
    a, b = (torch.randn(shape, device=device).to(getattr(torch, dtype)) for _ in range(2))
    product = torch.empty_like(a)
    product_s = fastest(lambda: torch.mm(a, b, out=product), device)
    return Limits(copied, summed, 2 * side**3 / product_s, dtype)


def _transfers(num_bytes: int, device: str) -> tuple[float, float]:
    """Return the bytes per second of copies (each byte counts twice) and of sums over this many bytes."""
    import torch

    source = torch.ones(num_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy_s = fastest(lambda: target.copy_(source), device)
    sum_s = fastest(lambda: source.sum(), device)
    return 2 * num_bytes / copy_s, num_bytes / sum_s


def fastest(call: Callable[[], object], device: str) -> float:
    """Return the seconds per call while the device's queue stays full."""
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
