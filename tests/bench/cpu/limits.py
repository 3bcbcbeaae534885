"""The limits of this machine, and the minimum cost of work on it.

A step takes at least the time of its multiplications at the measured matmul rate. It also takes at least the time to
read each weight once, and the cache of each sequence once, at the measured bandwidth. Activations, norms, embeddings
and sampling are not counted. The matmul rate is that of bfloat16; 8-bit products may exceed it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import NamedTuple

from bench.checkpoints import Shape
from bench.cpu import work
from runtime.errors import ConfigurationError

WEIGHT_BYTES = {"bf16": 2.0, "int8": 1.0, "int4": 4.5 / 8}  # includes a 16-bit scale per 32 weights for int4
CACHE_BYTES = 2  # bytes per number in the KV cache


class Limits(NamedTuple):
    """The measured limits of the machine."""

    bytes_per_s: float
    flops_per_s: float


class Cost:
    """Minimum times of a model in seconds."""

    def __init__(self, shape: Shape, weights: str, limits: Limits) -> None:
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        layer = shape.hidden * (2 * q + 2 * kv) + 3 * shape.hidden * shape.mlp
        self._shape = shape
        self._limits = limits
        self._body = shape.layers * layer  # number of weights of all layers
        self._head = shape.hidden * shape.vocab
        self._weight_bytes = WEIGHT_BYTES[weights] * (self._body + self._head)

    def step_s(self, rows: int, new: int, computed: int) -> float:
        """Return the minimum time of one step of `rows` sequences, each with `computed` tokens in the cache and `new`
        tokens.

        Each sequence has one row of logits. A token attends to all earlier tokens and to itself, which takes four
        operations per query head, dimension and pair.
        """
        shape = self._shape
        pairs = new * computed + new * (new + 1) / 2
        attention = 4 * shape.layers * shape.heads * shape.head_dim * pairs
        flops = rows * (2 * self._body * new + 2 * self._head + attention)
        cached = 2 * shape.layers * shape.kv_heads * shape.head_dim * CACHE_BYTES
        read = self._weight_bytes + rows * cached * (computed + new)
        return max(flops / self._limits.flops_per_s, read / self._limits.bytes_per_s)

    def request_s(self, rows: int, prompt: int, output: int, computed: int = 0) -> float:
        """Return the minimum time of `rows` simultaneous requests: one prefill step, then decode steps."""
        steps = (self.step_s(rows, 1, computed + prompt + i) for i in range(output - 1))
        return self.step_s(rows, prompt, computed) + sum(steps)

    def best(self, figure: str) -> float | None:
        """Return the figure of a machine at its limits, or None if no limit is known."""
        if figure.startswith("prefill"):
            length = int(figure.removeprefix("prefill").replace(",", ""))
            return length / self.step_s(1, length, 0)
        if figure.startswith("decode"):
            first = self.step_s(1, work.DECODE_PROMPT, 0)
            whole = self.request_s(1, work.DECODE_PROMPT, work.DECODE_TOKENS)
            return (work.DECODE_TOKENS - 1) / (whole - first)
        if figure.startswith("shared prefix"):
            seconds = self.request_s(work.SHARERS, work.OWN, work.SHARED_OUTPUT, work.PREFIX)
            if figure.endswith("cold"):
                seconds += self.step_s(1, work.PREFIX, 0)
            return work.SHARERS * work.SHARED_OUTPUT / seconds
        if figure.startswith("concurrency") or figure == work.STREAMED.name:
            number = work.STREAMS if figure == work.STREAMED.name else int(figure.split()[1])
            return number * work.OUTPUT / self.request_s(number, work.PROMPT, work.OUTPUT)
        return None


READ_BYTES = 1 << 30  # far larger than any cache
MATMULS = ((512, 2048, 2048), (2048, 1024, 4096), (2048, 2048, 2048), (2048, 4096, 4096))  # (tokens, inputs, outputs)
REPETITIONS = 10


def measure(threads: int) -> Limits:
    """Return the best of several repetitions, because a limit is the best possible value."""
    import torch

    torch.set_num_threads(threads)
    return Limits(bytes_per_s=_read_rate(), flops_per_s=max(_matmul_rate(*size) for size in MATMULS))


def _read_rate() -> float:
    """Return the bytes per second that all threads read together: the better of a sum and a product with one row."""
    import torch

    numbers = torch.ones(READ_BYTES // 4)
    summed = READ_BYTES / _least_s(numbers.sum)
    del numbers
    size = 16_384
    weight = torch.ops.mkldnn._reorder_linear_weight.default(
        torch.ones(READ_BYTES // 2 // size, size, dtype=torch.bfloat16), None
    )
    row = torch.ones(1, size, dtype=torch.bfloat16)
    linear = torch.ops.mkldnn._linear_pointwise.default
    return max(summed, READ_BYTES / _least_s(lambda: linear(row, weight, None, "none", [], "")))


def _matmul_rate(tokens: int, width: int, out: int) -> float:
    """Return the operations per second of a bfloat16 product with a weight that oneDNN has packed."""
    import torch

    weight = torch.ops.mkldnn._reorder_linear_weight.default(torch.ones(out, width, dtype=torch.bfloat16), None)
    x = torch.ones(tokens, width, dtype=torch.bfloat16)
    linear = torch.ops.mkldnn._linear_pointwise.default
    return 2 * tokens * width * out / _least_s(lambda: linear(x, weight, None, "none", [], ""))


def _least_s(call: Callable[[], object]) -> float:
    least = float("inf")
    for _ in range(REPETITIONS):
        began = perf_counter()
        call()
        least = min(least, perf_counter() - began)
    return least


def measured(threads: int, environment: Mapping[str, str]) -> Limits:
    """Measure in a separate process. Raises `ConfigurationError` if that fails."""
    command = [sys.executable, "-m", "bench.cpu.limits", str(threads)]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise ConfigurationError(f"The machine's limits cannot be measured: {' '.join(last)}")
    return Limits(**json.loads(done.stdout))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(int(sys.argv[1]))._asdict()) + "\n")
