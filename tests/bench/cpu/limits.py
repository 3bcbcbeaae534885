"""`python -m bench.cpu.limits`: how fast this machine reads memory and multiplies, by measuring.

In a process of its own, so that its memory and threads are nobody's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from time import perf_counter

from bench.cpu.cost import Limits
from runtime.errors import ConfigurationError

READ_BYTES = 1 << 30  # far more than any cache holds
MATMULS = ((512, 2048, 2048), (2048, 1024, 4096), (2048, 2048, 2048), (2048, 4096, 4096))  # tokens, in, out
REPETITIONS = 10


def measure(threads: int) -> Limits:
    """The best of several repetitions: a limit is what is possible."""
    import torch

    torch.set_num_threads(threads)
    return Limits(bytes_per_s=_read_rate(), flops_per_s=max(_matmul_rate(*size) for size in MATMULS))


def _read_rate() -> float:
    """Bytes per second that all threads read together, by the better of a sum and a product with one row."""
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
    """Operations per second of a bfloat16 product with a weight that oneDNN has packed."""
    import torch

    weight = torch.ops.mkldnn._reorder_linear_weight.default(
        torch.ones(out, width, dtype=torch.bfloat16), None
    )
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
    """Measure in a process of its own. Raises `ConfigurationError` when that fails."""
    command = [sys.executable, "-m", "bench.cpu.limits", str(threads)]
    done = subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:]
        raise ConfigurationError(f"The machine's limits cannot be measured: {' '.join(last)}")
    return Limits(**json.loads(done.stdout))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(int(sys.argv[1]))._asdict()) + "\n")
