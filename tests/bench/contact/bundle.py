"""`gpu-bundle`: collect packages for a GPU machine without a package index, and a script that installs them.

The machine is expected to have Python 3.12, torch, triton, transformers and pytest. Wheels of the other packages are
collected, pure or for Linux on x86-64, with exact versions in lock.txt.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from packaging.requirements import Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

from bench import PROGRAM
from runtime.errors import ConfigurationError
from serve.bench import report
from serve.bench.options import new_parser

ROOT = Path(__file__).parents[3]
PYTHON = (3, 12)
GLIBC_MINORS = (39, 35, 34, 31, 28, 27, 24, 17, 5)
MAX_BYTES = 60 * 2**20
# packages in addition to Penstock's dependencies
WANTED = (
    "pytest-asyncio", "pytest-timeout", "hypothesis", "sortedcontainers", "flashinfer-python==0.6.13",
    "apache-tvm-ffi",
)  # fmt: skip
# Packages that are left out, because no stage needs them: FlashInfer's command line, and kernels for other machines.
LEFT_OUT = frozenset({"nvidia-cutlass-dsl", "nvidia-cudnn-frontend", "cuda-tile"})
THERE = frozenset({
    "anyio", "certifi", "click", "einops", "filelock", "h11", "httpcore", "httpx", "idna", "iniconfig", "jinja2",
    "ninja", "numpy", "nvidia-ml-py", "packaging", "pluggy", "pygments", "pytest", "pyyaml", "requests",
    "safetensors", "sniffio", "tabulate", "tokenizers", "torch", "tqdm", "transformers", "triton",
    "typing-extensions",
})  # fmt: skip
RUN = """#!/usr/bin/env bash
# Install the wheels beside this script into a folder of their own and run the stages; options are gpu-contact's.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
site=$(mktemp -d)
python3 -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$here"/wheels/*.whl
cd "$here/.."
export PYTHONPATH="$PWD:$PWD/tests:$PWD/tests/kit:$PWD/notebooks:$site${PYTHONPATH:+:$PYTHONPATH}"
exec python3 -m bench gpu-contact "$@"
"""


def parser() -> argparse.ArgumentParser:
    options = new_parser(
        "gpu-bundle",
        "Gather wheels for a machine with Python 3.12, torch, triton and transformers that reaches no package "
        "index. Run its run.sh there; its options are those of gpu-contact.",
        program=PROGRAM,
    )
    options.add_argument("--output", default="gpu-bundle", help="the folder; it is emptied of wheels first")
    return options


def main(argv: Sequence[str]) -> int:
    """Download, check and describe the wheels. Return 1 if they do not fit."""
    folder = Path(parser().parse_args(argv).output)
    wheels = folder / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    for old in wheels.glob("*.whl"):
        old.unlink()
    _download(wheels)
    found = sorted(wheels.glob("*.whl"))
    problems = check(found)
    if not problems:
        _install(found)
    size = sum(wheel.stat().st_size for wheel in found)
    if size > MAX_BYTES:
        problems.append(f"The wheels have {size / 2**20:.1f} MiB; at most {MAX_BYTES / 2**20:.0f} may be carried.")
    (folder / "lock.txt").write_text("".join(f"{line}\n" for line in lock(found)), encoding="utf-8")
    script = folder / "run.sh"
    script.write_text(RUN, encoding="utf-8")
    script.chmod(0o755)
    report.say(f"{len(found)} wheels, {size / 2**20:.1f} MiB, in {folder}. There: bash {script} --budget 540")
    for problem in problems:
        report.say(f"error: {problem}")
    return 1 if problems else 0


def wanted() -> list[str]:
    """Return the dependencies in pyproject.toml that the machine lacks, and further packages that the stages use."""
    own = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    return [*(need for need in own if canonicalize_name(Requirement(need).name) not in THERE), *WANTED]


def _download(wheels: Path) -> None:
    _pip("download", "--dest", str(wheels), *wanted())


def _install(wheels: Sequence[Path]) -> None:
    """Install as run.sh does: into an empty folder, without a package index."""
    with TemporaryDirectory() as folder:
        _pip("install", "--no-index", "--no-compile", "--target", folder, *map(str, wheels))


def _pip(command: str, *words: str) -> None:
    """Run pip for the GPU machine's platform. Raises `ConfigurationError` if it fails."""
    platforms = [word for minor in GLIBC_MINORS for word in ("--platform", f"manylinux_2_{minor}_x86_64")]
    platforms += ["--platform", "manylinux2014_x86_64", "--platform", "linux_x86_64"]
    target = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", "--no-deps"]
    try:
        subprocess.run([sys.executable, "-m", "pip", command, "--quiet", *target, *platforms, *words], check=True)
    except subprocess.CalledProcessError as error:
        raise ConfigurationError(f"pip could not {command} the wheels (exit status {error.returncode}).") from error


def check(wheels: Sequence[Path]) -> list[str]:
    """Return the reasons why these wheels cannot be installed and imported on the GPU machine."""
    problems = []
    supported = _supported_tags()
    names = {canonicalize_name(parse_wheel_filename(wheel.name)[0]) for wheel in wheels}
    for wheel in wheels:
        name, _, _, tags = parse_wheel_filename(wheel.name)
        if tags.isdisjoint(supported):
            problems.append(f"{wheel.name} is not for Python 3.12 on Linux and x86-64.")
        lacking = {need for need in _needs(wheel) if need not in names | THERE | LEFT_OUT}
        if lacking:
            problems.append(f"{name} needs {', '.join(sorted(lacking))}, which is neither carried nor there.")
    return problems


def lock(wheels: Sequence[Path]) -> list[str]:
    """Return `name==version` of each wheel."""
    return [f"{name}=={version}" for name, version, _, _ in (parse_wheel_filename(wheel.name) for wheel in wheels)]


def _supported_tags() -> frozenset[Tag]:
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(5, max(GLIBC_MINORS) + 1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    return frozenset(cpython_tags(PYTHON, platforms=platforms)) | frozenset(
        compatible_tags(PYTHON, "cp312", platforms=platforms)
    )


def _needs(wheel: Path) -> set[str]:
    """Return the names of the packages that this package requires on the GPU machine, without extras."""
    there = {"extra": "", "python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux"}
    with ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(metadata).decode("utf-8").splitlines()
    requirements = [Requirement(line[15:]) for line in lines if line.startswith("Requires-Dist: ")]
    return {
        canonicalize_name(requirement.name)
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate(there)
    }
