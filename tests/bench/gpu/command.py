"""`gpu`: every figure of one device beside what its memory and arithmetic allow, as a table for the docs."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import PROGRAM
from bench.gpu.bench import FULL, MODELS, SMALL, Bench, release
from bench.gpu.cold_row import cold
from bench.gpu.figure import HEAD, Failure, Figure, document_of, heading, limit_lines, line_of
from bench.gpu.launch_row import launches
from bench.gpu.limits import measure_limits
from bench.gpu.offline_rows import decode, mixed, offline, prefix
from bench.gpu.online_rows import occupancy, online
from ops.machine import Machine
from runtime.config import Args
from runtime.errors import ConfigurationError, PenstockError, first_error
from serve.bench import report
from serve.bench.options import add_output_options, new_parser

ROWS: Mapping[str, Callable[[Bench], list[Figure]]] = {
    "decode": decode,
    "offline": offline,
    "mixed": mixed,
    "prefix": prefix,
    "online": online,
    "occupancy": occupancy,
    "launch": launches,
    "cold": cold,
}


def parser() -> argparse.ArgumentParser:
    options = new_parser(
        "gpu",
        "Measure this machine's GPU with random weights of real shapes; prints a Markdown table. Every other "
        "option is the engine's.",
        program=PROGRAM,
    )
    options.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS), help="what to measure")
    options.add_argument("--shape", choices=tuple(MODELS), help="one model for all rows; tiny has small sizes")
    options.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the command")
    options.add_argument("--work-dir", help="keeps the tokenizers, so that a second run starts sooner")
    add_output_options(options)
    return options


def main(argv: Sequence[str]) -> int:
    """Measure and print row after row; 1 when a row could not be measured."""
    options, words = parser().parse_known_args(argv)
    Args.parse(words)  # refused before anything is measured
    _check_device(options.device, Machine.probe())
    with TemporaryDirectory() as scratch:
        rows = _measure(options, tuple(words), Path(options.work_dir or scratch), argv)
    return 1 if any(isinstance(row, Failure) for row in rows) else 0


def _measure(
    options: argparse.Namespace, words: tuple[str, ...], folder: Path, argv: Sequence[str]
) -> list[Figure | Failure]:
    """Everything is printed and written as soon as it is known: a later row may take the process with it."""
    small, only = options.shape == "tiny", MODELS.get(options.shape)
    limits = measure_limits(options.device, only.dtype if only else "bfloat16", small=small)
    release(options.device)
    bench = Bench(
        device=options.device,
        folder=folder,
        limits=limits,
        sizes=SMALL if small else FULL,
        only=only,
        words=words,
    )
    opening = report.document("gpu", {}, {}, argv=argv, program=PROGRAM)
    report.say("\n".join([heading(opening, options.device), "", *limit_lines(limits), "", *HEAD]))
    rows: list[Figure | Failure] = []
    for name in options.rows:
        found = _row(name, bench)
        for row in found:
            report.say(line_of(row))
        rows += found
        if options.output_file:
            results = {"limits": limits, "rows": document_of(rows)}
            content = report.document("gpu", {**vars(options), "engine": words}, results, argv=argv, program=PROGRAM)
            report.write(options.output_file, content)
    return rows


def _row(name: str, bench: Bench) -> list[Figure] | list[Failure]:
    try:
        return ROWS[name](bench)
    except (PenstockError, ExceptionGroup) as error:
        why = first_error(error)
        if not isinstance(why, PenstockError):
            raise
        return [Failure(name, str(why))]


def _check_device(device: str, machine: Machine) -> None:
    if device == "cpu":
        return
    if not device.startswith("cuda"):
        raise ConfigurationError(f"--device {device} is neither cuda nor cpu.")
    if not machine.gpus or machine.torch_cuda is None:
        lacking = "no NVIDIA GPU" if not machine.gpus else "a torch that is built without CUDA"
        raise ConfigurationError(
            f"This machine has {lacking}, and this command measures a GPU. To try the command itself: "
            "--device cpu --shape tiny."
        )
