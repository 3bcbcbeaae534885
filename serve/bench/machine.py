"""What a figure was measured on: hardware and versions, for the result file."""

from __future__ import annotations

import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ops.machine import Machine

VECTOR_FLAGS = ("avx", "amx", "fma", "f16c", "asimd", "sve", "bf16", "i8mm")
_PACKAGES = ("penstock", "tokenizers", "uvicorn", "uvloop", "httptools", "numpy")


def describe_machine(machine: Machine | None = None) -> dict[str, Any]:
    """Processor, what its vectors can do, usable cores, memory in bytes, GPUs, operating system."""
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
    """Versions of Python and of the packages that matter, where they are installed."""
    machine = Machine.probe() if machine is None else machine
    versions = {"python": platform.python_version(), **machine.packages}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def cpu_name() -> str:
    """The processor's own name for itself, or the architecture's."""
    try:
        described = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        described = ""
    found = re.search(r"^model name\s*:\s*(.+)$", described, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()
