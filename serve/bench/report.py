"""Reports of a run: a table, and a JSON file with the results, the hardware and the versions."""

from __future__ import annotations

import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson

from ops.machine import Machine
from serve.bench import PROGRAM
from serve.bench.metrics import Results, Summary

SCHEMA_VERSION = 1
SECRET = "***"
SECRET_OPTIONS = ("--api-key", "--header")
SECRET_SETTINGS = ("api_key", "header")

Row = tuple[str, Any]


HEADS = ("mean", "median", "p90", "p95", "p99", "max")


def table(
    title: str,
    rows: Sequence[Row],
    distributions: Mapping[str, Summary | None] | None = None,
    *,
    heads: Sequence[str] = HEADS,
) -> str:
    """Return a table as text.

    It has one line for each (name, value) in `rows`, and then one line for each distribution, with the statistics named
    in `heads`.
    """
    width = max([len(name) for name, _ in rows] + [len(name) for name in distributions or {}] + [24]) + 2
    lines = [f"== {title} ".ljust(width + 66, "=")]
    lines += [f"{name:<{width}}{text_of(value)}" for name, value in rows if value is not None]
    shown = {name: summary for name, summary in (distributions or {}).items() if summary is not None}
    if shown:
        lines.append(" " * width + "".join(f"{head:>11}" for head in heads))
        for name, summary in shown.items():
            figures = (getattr(summary, head) for head in heads)
            lines.append(f"{name:<{width}}" + "".join(f"{figure:>11,.2f}" for figure in figures))
    return "\n".join(lines)


def throughput(results: Results) -> list[Row]:
    """Return rows with token counts and rates."""
    return [
        ("input tokens", results.input_tokens),
        ("cached input tokens", results.cached_tokens),
        ("output tokens", results.output_tokens),
        ("requests/s", results.requests_per_s),
        ("input tokens/s", results.input_tokens_per_s),
        ("output tokens/s", results.output_tokens_per_s),
        ("total tokens/s", results.total_tokens_per_s),
    ]


def text_of(value: Any) -> str:
    """Return a value as text. Numbers have thousands separators; floats below 1000 have two decimal places."""
    if isinstance(value, float):
        return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def document(
    benchmark: str,
    settings: Mapping[str, Any],
    results: Any,
    details: Any = None,
    argv: Sequence[str] = (),
    *,
    program: str = PROGRAM,
) -> dict[str, Any]:
    """Return the content of the result file: the results, and all data needed to repeat the run."""
    machine = Machine.probe()
    content = {
        "schema_version": SCHEMA_VERSION,
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"{program} {shlex.join([benchmark, *without_secrets(argv)])}",
        "machine": describe_machine(machine),
        "versions": describe_versions(machine),
        "settings": _public(settings),
        "results": plain(results),
    }
    return content if details is None else {**content, "requests": plain(details)}


def _public(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without secrets (keys and headers), at any depth."""
    return {
        name: _public(value) if isinstance(value, Mapping) else value
        for name, value in settings.items()
        if name not in SECRET_SETTINGS
    }


def without_secrets(argv: Sequence[str]) -> list[str]:
    """Return the arguments, with the values of keys and headers masked."""
    shown: list[str] = []
    for argument in argv:
        name, equals, _ = argument.partition("=")
        if shown and shown[-1] in SECRET_OPTIONS:
            shown.append(SECRET)
        elif equals and name in SECRET_OPTIONS:
            shown.append(f"{name}={SECRET}")
        else:
            shown.append(argument)
    return shown


def write(path: str, content: Mapping[str, Any]) -> None:
    """Write the result file. Numbers that JSON cannot express become null."""
    Path(path).write_bytes(orjson.dumps(content, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))


def say(text: str) -> None:
    """Write a line to stdout."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def plain(value: Any) -> Any:
    """Convert named tuples and dataclasses, at any depth, to dicts by field name."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: plain(getattr(value, name)) for name in value._fields}  # pyright: ignore
    if is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value


VECTOR_FLAGS = ("avx", "amx", "fma", "f16c", "asimd", "sve", "bf16", "i8mm")
_PACKAGES = ("penstock", "tokenizers", "uvicorn", "uvloop", "httptools", "numpy")


def describe_machine(machine: Machine | None = None) -> dict[str, Any]:
    """Return processor, vector extensions, usable cores, memory in bytes, GPUs and operating system."""
    machine = Machine.probe() if machine is None else machine
    return {
        "cpu": cpu_name(),
        "cpu_flags": sorted(flag for flag in machine.cpu_flags if flag.startswith(VECTOR_FLAGS)),
        "cores": machine.num_cpus,
        "memory_bytes": machine.total_bytes,
        "gpus": [gpu.name for gpu in machine.gpus],
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def describe_versions(machine: Machine | None = None) -> dict[str, str]:
    """Return the versions of Python and of relevant installed packages."""
    machine = Machine.probe() if machine is None else machine
    versions = {"python": platform.python_version(), **machine.packages}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def cpu_name() -> str:
    """Return the processor's model name, or the architecture if it is not known."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        cpuinfo = ""
    match = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()
