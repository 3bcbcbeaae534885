"""Measure kernels of an 8B model against the limits of the device's memory bandwidth and arithmetic."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

import numpy as np
import torch

from bench.gpu.figure import Failure, Figure, document_of, line_of
from bench.gpu.limits import Limits, Work, fastest, measure_limits
from ops.attention import AttentionMetadata, AttentionOptions
from ops.backends import ATTENTION
from ops.machine import Machine
from serve.bench import report

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16


class Case(NamedTuple):
    """Rows of one attention call, as (tokens in the cache, tokens computed)."""

    name: str
    rows: tuple[tuple[int, int], ...]

    @property
    def work(self) -> Work:
        """Return bytes (keys, values, queries and outputs once, in 16 bits) and operations (two products per pair of
        positions).
        """
        seen = sum(start + count for start, count in self.rows)
        pairs = sum(count * start + count * (count + 1) / 2 for start, count in self.rows)
        tokens = sum(count for _, count in self.rows)
        num_bytes = 2 * (2 * seen * KV_HEADS + 2 * tokens * HEADS) * HEAD_DIM
        return Work(num_bytes, 4 * pairs * HEADS * HEAD_DIM)


FULL = (
    Case("1 row after 8,192 tokens", ((8191, 1),)),
    Case("64 rows after 2,048 tokens each", ((2047, 1),) * 64),
    Case("256 rows after 1,024 tokens each", ((1023, 1),) * 256),
    Case("a prompt of 4,096 tokens", ((0, 4096),)),
)
SMALL = (Case("2 rows after 64 tokens each", ((63, 1),) * 2), Case("a prompt of 64 tokens", ((0, 64),)))


def main(argv: Sequence[str]) -> int:
    """Measure, print and write the rows. Return 1 if a backend failed."""
    parser = argparse.ArgumentParser(prog="bench.contact.speeds")
    parser.add_argument("--device", required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--output-file")
    options = parser.parse_args(argv)
    limits = measure_limits(options.device, "bfloat16", small=options.small)
    rows: list[Figure | Failure] = []
    for file in _runnable_files():
        for case in SMALL if options.small else FULL:
            rows.append(_attention(file, case, options.device, limits))
            report.say(line_of(rows[-1]))
            if options.output_file:  # written after every row, because the next one may crash the process
                results = {"limits": limits, "rows": document_of(rows)}
                report.write(options.output_file, report.document("speeds", vars(options), results))
    return 1 if any(isinstance(row, Failure) for row in rows) else 0


def _runnable_files() -> list[str]:
    machine = Machine.probe()
    gpu = machine.gpus[0] if machine.gpus else None
    return sorted({backend.file for backend in ATTENTION.values() if not backend.unmet(machine, gpu)})


def _attention(file: str, case: Case, device: str, limits: Limits) -> Figure | Failure:
    what = f"attention {file.removeprefix('with_')}, {case.name}"
    try:
        call = _call(file, case, device)
        took_s = fastest(call, device)
    except (RuntimeError, ValueError) as why:
        return Failure(what, str(why))
    limit_s = limits.seconds(case.work)
    bound = limits.bound(case.work)
    return Figure(what, "32/8 heads of 128", took_s * 1e6, "us", limit_s * 1e6, bound, lower_is_better=True)


def _call(file: str, case: Case, device: str) -> Callable[[], object]:
    generator = torch.Generator().manual_seed(1)
    widths = [-(-(start + count) // PAGE) for start, count in case.rows]
    table = np.zeros((len(case.rows), max(widths)), np.int32)
    pages = 0
    for row, width in enumerate(widths):
        table[row, :width] = range(pages, pages + width)
        pages += width
    starts, counts = zip(*case.rows)
    pool = (pages, KV_HEADS, PAGE, HEAD_DIM)
    k_pool, v_pool = (torch.randn(pool, generator=generator).bfloat16().to(device) for _ in range(2))
    q = torch.randn((sum(counts), HEADS, HEAD_DIM), generator=generator).bfloat16().to(device)
    metadata = AttentionMetadata.build(starts, counts, table, PAGE, device)
    attend = import_module(f"ops.attention.{file}").make_attend()
    return lambda: attend(q, k_pool, v_pool, metadata, AttentionOptions(scale=HEAD_DIM**-0.5))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
