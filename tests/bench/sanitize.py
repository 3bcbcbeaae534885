"""`sanitize`: run the tests of the C++ kernels with the kernels compiled for a sanitizer.

The library is compiled first, because the sanitizer's runtime is preloaded into the tests' process, and compilers fail
under it. A finding ends the tests and is printed with its place in the sources.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench import PROGRAM
from cpp_kernels import SANITIZER, SANITIZERS, compiler, flags
from ops.cpp import build as building
from ops.machine import Machine
from serve.bench.options import new_parser

ROOT = Path(__file__).parents[2]
COMPILE_S = 1800  # seconds per compiled unit: a sanitizer multiplies the time
# No Triton, and no compilers, which fail with a preloaded runtime.
SELECTED = (
    "-m",
    "not interpreter and not long",
    "-k",
    "not lesser and not test_build and not prebuilt and not refused",
)
RUNTIMES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}
EXCEPTIONS = "libstdc++.so.6"  # preloaded too, because the sanitizer's runtime looks for `__cxa_throw` when it starts
# Options of the sanitizers. Python never frees some memory, and torch's and Python's threads are not instrumented.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:halt_on_error=1:abort_on_error=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:ignore_noninstrumented_modules=1:report_signal_unsafe=0",
}


def main(argv: Sequence[str]) -> int:
    """Compile the kernels for a sanitizer, run their tests, and return the exit status of pytest."""
    parser = new_parser("sanitize", __doc__ or "", program=PROGRAM)
    parser.add_argument("sanitizer", choices=[*SANITIZERS])
    options, rest = parser.parse_known_args(argv)
    os.environ[SANITIZER] = options.sanitizer
    building.TIMEOUT_S = COMPILE_S
    print(f"Compiled {building.build(compiler(), Machine.probe().cpu_flags, flags())}", flush=True)
    runtimes = [_found(name) for name in (RUNTIMES[options.sanitizer], EXCEPTIONS)]
    if not all(Path(each).is_file() for each in runtimes):
        sys.stderr.write(f"{PROGRAM}: {compiler()} lacks one of {', '.join(runtimes)}\n")
        return 2
    tests = rest if any(not word.startswith("-") and Path(word).exists() for word in rest) else [*_tests(), *rest]
    program = [sys.executable, "-m", "pytest", "-n", "0", "-q", "--timeout", "1200", *SELECTED]
    done = subprocess.run(
        [*program, *tests], cwd=ROOT, env={**os.environ, **OPTIONS, "LD_PRELOAD": " ".join(runtimes)}, check=False
    )
    return done.returncode


def _found(library: str) -> str:
    """Return the path of a library of the compiler, or its name if the compiler does not have it."""
    command = [compiler(), f"-print-file-name={library}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _tests() -> list[str]:
    """Return the test files that use the C++ kernels, without those that import Triton, which sanitizers end."""
    files = sorted((ROOT / "tests" / "ops").rglob("test_*.py"))
    texts = {str(file): file.read_text(encoding="utf-8") for file in files}
    return [file for file, text in texts.items() if "cpp" in text and "triton" not in text]
