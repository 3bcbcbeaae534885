"""Measure single kernels against the limits of the device's memory bandwidth and arithmetic."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import NamedTuple

import numpy as np
import torch

from bench.contact.choosing_rows import choosing
from bench.contact.layer_rows import BLOCKS, experts, recurrence
from bench.contact.timing import Call, Place, Row, measure
from bench.gpu.figure import Failure, Figure, document_of, line_of
from bench.gpu.limits import Work, measure_limits
from ops.attention import AttentionMetadata, AttentionOptions
from ops.backends import ATTENTION
from ops.machine import Machine
from ops.matmul.grouped import GroupedWeight, round_to_float8, round_to_groups
from serve.bench import report

HEADS, KV_HEADS, HEAD_DIM, PAGE = 32, 8, 128, 16
# Formats of weights -> bits per weight with its scales.
FORMATS = {
    "bfloat16": 16,
    "float8": 8,
    "float8 in blocks": 8.25,
    "8 bits": 8,
    "4 bits": 5,
    "4 bits in groups of 128 with shifts": 4.5,
}


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
    Case("1 row after 131,072 tokens", ((131_071, 1),)),
    Case("16 rows after 32,768 tokens each", ((32_767, 1),) * 16),
    Case("64 rows after 2,048 tokens each", ((2047, 1),) * 64),
    Case("256 rows after 1,024 tokens each", ((1023, 1),) * 256),
    Case("a prompt of 4,096 tokens", ((0, 4096),)),
)
SMALL = (Case("2 rows after 64 tokens each", ((63, 1),) * 2), Case("a prompt of 64 tokens", ((0, 64),)))


def main(argv: Sequence[str]) -> int:
    """Measure, print and write the rows. Return 1 if a kernel failed."""
    parser = argparse.ArgumentParser(prog="bench.contact.speeds")
    parser.add_argument("--device", required=True)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--kernels", nargs="+", choices=tuple(KERNELS), default=list(KERNELS))
    parser.add_argument("--output-file")
    options = parser.parse_args(argv)
    limits = measure_limits(options.device, "bfloat16", small=options.small)
    place = Place(options.device, limits, options.small)
    rows: list[Figure | Failure] = []
    for row in (row for name in options.kernels for row in KERNELS[name](place)):
        rows.append(row())
        report.say(line_of(rows[-1]))
        if options.output_file:  # written after every row, because the next one may crash the process
            results = {"limits": limits, "rows": document_of(rows)}
            report.write(options.output_file, report.document("speeds", vars(options), results))
    return 1 if any(isinstance(row, Failure) for row in rows) else 0


def _attentions(place: Place) -> Iterator[Row]:
    """Yield attention with every backend that runs here."""
    for file in _runnable_files():
        for case in SMALL if place.small else FULL:
            what = f"attention {file.removeprefix('with_')}, {case.name}"
            yield partial(measure, place, what, "32/8 heads of 128", case.work, partial(_call, file, case, place))


def _products(place: Place) -> Iterator[Row]:
    """Yield products for each weight format that the device's kernels read. The arithmetic limit is bfloat16's."""
    (out_size, in_size), counts = ((128, 128), (1, 4)) if place.small else ((14_336, 4096), (1, 16, 256))
    for name in FORMATS:
        if name == "8 bits" and not place.on_gpu:  # `native`, which a rehearsal uses, does not read it
            continue
        for count in counts:
            work = Work(out_size * in_size * FORMATS[name] / 8, 2 * count * out_size * in_size)
            what, make = f"product in {name}, {count} rows", partial(_product, place, name, count, out_size, in_size)
            yield partial(measure, place, what, f"{in_size} to {out_size}", work, make, in_graph=True)


def _product(place: Place, name: str, num_rows: int, out_size: int, in_size: int) -> Call:
    matmul = import_module(f"ops.matmul.{'native' if name == 'bfloat16' else place.kernels}")
    weight = place.draw(out_size, in_size, scale=in_size**-0.5, dtype=torch.float32)
    if name == "bfloat16":
        prepared = weight.bfloat16()
    elif name == "8 bits":
        prepared = matmul.prepare(weight, bits=8)
    else:
        prepared = matmul.prepare_grouped(_rounded(name, weight), torch.bfloat16)
    x = place.draw(num_rows, in_size)
    return lambda: matmul.linear(x, prepared)


def _rounded(name: str, weight: torch.Tensor) -> GroupedWeight:
    if name == "4 bits":
        return round_to_groups(weight, 32)
    if name.startswith("4 bits"):
        rounded = round_to_groups(weight, 128)
        return rounded._replace(shifts=0.1 * rounded.scales)
    rounded = round_to_float8(weight)
    return rounded if name == "float8" else rounded.as_form(BLOCKS)


def _runnable_files() -> list[str]:
    machine = Machine.probe()
    gpu = machine.gpus[0] if machine.gpus else None
    return sorted({backend.file for backend in ATTENTION.values() if not backend.unmet(machine, gpu)})


def _call(file: str, case: Case, place: Place) -> Call:
    widths = [-(-(start + count) // PAGE) for start, count in case.rows]
    table = np.zeros((len(case.rows), max(widths)), np.int32)
    pages = 0
    for row, width in enumerate(widths):
        table[row, :width] = range(pages, pages + width)
        pages += width
    starts, counts = zip(*case.rows)
    k_pool, v_pool = (place.draw(pages, KV_HEADS, PAGE, HEAD_DIM) for _ in range(2))
    q = place.draw(sum(counts), HEADS, HEAD_DIM)
    metadata = AttentionMetadata.build(starts, counts, table, PAGE, place.device)
    attend = import_module(f"ops.attention.{file}").make_attend()
    return lambda: attend(q, k_pool, v_pool, metadata, AttentionOptions(scale=HEAD_DIM**-0.5))


KERNELS: Mapping[str, Callable[[Place], Iterator[Row]]] = {
    "products": _products,
    "attention": _attentions,
    "choosing": choosing,
    "experts": experts,
    "recurrence": recurrence,
}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
