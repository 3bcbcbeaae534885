"""Measure products and attention of an 8B model against the limits of the device's memory bandwidth and arithmetic."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import NamedTuple

import numpy as np
import torch

from bench.gpu.figure import Failure, Figure, document_of, line_of
from bench.gpu.limits import Limits, Work, fastest, measure_limits
from ops.attention import AttentionMetadata, AttentionOptions
from ops.backends import ATTENTION
from ops.machine import Machine
from ops.matmul.grouped import GroupedWeight, GroupForm, round_to_float8, round_to_groups
from serve.bench import report

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
# Formats of weights -> bits per weight with its scales.
FORMATS = {"bfloat16": 16, "float8": 8, "float8 in blocks": 8.25, "4 bits": 5}
BLOCKS = GroupForm(128, 8, shifted=False, floating=True)


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
    Case("1 row after 32,768 tokens", ((32_767, 1),)),
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
    for row in (*_products(options.device, limits, small=options.small), *_attentions(options.device, limits, options)):
        rows.append(row())
        report.say(line_of(rows[-1]))
        if options.output_file:  # written after every row, because the next one may crash the process
            results = {"limits": limits, "rows": document_of(rows)}
            report.write(options.output_file, report.document("speeds", vars(options), results))
    return 1 if any(isinstance(row, Failure) for row in rows) else 0


def _attentions(device: str, limits: Limits, options: argparse.Namespace) -> Iterator[Callable[[], Figure | Failure]]:
    for file in _runnable_files():
        for case in SMALL if options.small else FULL:
            yield partial(_attention, file, case, device, limits)


def _products(device: str, limits: Limits, *, small: bool) -> Iterator[Callable[[], Figure | Failure]]:
    """Yield products in the formats of weights that the device's kernels read."""
    formats = FORMATS if device.startswith("cuda") else ("bfloat16",)
    sizes, counts = ((64, 64), (1, 4)) if small else ((14_336, 4096), (1, 16, 256))
    for name in formats:
        for count in counts:
            yield partial(_product, name, count, sizes, device, limits)


def _product(name: str, num_rows: int, sizes: tuple[int, int], device: str, limits: Limits) -> Figure | Failure:
    """Measure a product with a weight of these sizes (outputs, inputs). The limit is that of bfloat16 operations."""
    (out_size, in_size), what = sizes, f"product in {name}, {num_rows} rows"
    try:
        matmul = import_module("ops.matmul.native" if name == "bfloat16" else "ops.matmul.with_triton")
        weight = torch.randn(out_size, in_size, device=device) * in_size**-0.5
        if name == "bfloat16":
            prepared = weight.bfloat16()
        else:
            prepared = matmul.prepare_grouped(_rounded(name, weight), torch.bfloat16)
        x = torch.randn(num_rows, in_size, device=device).bfloat16()
        took_s = fastest(lambda: matmul.linear(x, prepared), device)
    except (RuntimeError, ValueError) as why:
        return Failure(what, str(why))
    work = Work(out_size * in_size * FORMATS[name] / 8, 2 * num_rows * out_size * in_size)
    shape = f"{in_size} to {out_size}"
    return Figure(what, shape, took_s * 1e6, "us", limits.seconds(work) * 1e6, limits.bound(work), lower_is_better=True)


def _rounded(name: str, weight: torch.Tensor) -> GroupedWeight:
    if name == "4 bits":
        return round_to_groups(weight, 32)
    rounded = round_to_float8(weight)
    return rounded if name == "float8" else rounded.as_form(BLOCKS)


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
