"""What a figure was measured on: hardware and versions, for the result file."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = (
    "penstock",
    "torch",
    "transformers",
    "tokenizers",
    "triton",
    "uvicorn",
    "uvloop",
    "httptools",
    "numpy",
)


def describe_machine() -> dict[str, Any]:
    """Processor, usable cores, memory in bytes, names of the GPUs, operating system."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": gpu_names(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def describe_versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, where they are installed."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def gpu_names() -> list[str]:
    """As the driver's own tool lists them; none where there is no such tool."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, "--query-gpu=name", "--format=csv,noheader"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return listed.stdout.split("\n")[:-1] if listed.returncode == 0 else []
