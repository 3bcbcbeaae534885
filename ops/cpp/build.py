"""Compiling the C++ kernels for this processor, once.

The library is plain C++ without torch's headers, and its units are compiled at the same time, so it takes seconds. It
is kept in the user's cache under a name made of its sources, the compiler and the processor: another machine on the
same home directory makes its own.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).with_name("source")
_FLOAT32 = ("-DTYPE=float", "-DTYPE_NAME=float32")
_BFLOAT16 = ("-DTYPE=BFloat16", "-DTYPE_NAME=bfloat16")
# Each a source and its own flags; what takes longest comes first.
UNITS = (
    ("kernels.cpp", *_BFLOAT16),
    ("kernels.cpp", *_FLOAT32),
    ("attention.cpp", *_FLOAT32),
    ("attention.cpp", *_BFLOAT16),
    ("library.cpp",),
)
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++20",
    "-pthread",
    "-ffp-contract=fast",
    "-fPIC",
    "-Wno-psabi",
)
TIMEOUT_S = 300


class BuildError(RuntimeError):
    """The kernels cannot be compiled here; the message says why."""


def cache_directory() -> Path:
    """Where libraries are kept: `$XDG_CACHE_HOME/penstock/cpp`, by default under `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "penstock" / "cpp"


def library_path(
    compiler: str, processor: Sequence[str] | frozenset[str], flags: Sequence[str] = FLAGS
) -> Path:
    """Where the library for this compiler and a processor of these flags is, or will be."""
    return cache_directory() / _name(compiler, processor, flags)


def _name(compiler: str, processor: Sequence[str] | frozenset[str], flags: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        if source.suffix in (".cpp", ".h"):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    digest.update("\0".join([os.path.realpath(compiler), *flags, *sorted(processor)]).encode())
    return f"kernels-{digest.hexdigest()[:24]}.so"


def build(compiler: str, processor: Sequence[str] | frozenset[str], flags: Sequence[str] = FLAGS) -> Path:
    """The compiled library, from the cache where it is there. Blocks for some seconds where it is not.

    Several processes may build at once; each writes its own file, and the last one stays. Where the cache cannot be
    written, the library is made in a temporary directory. Raises `BuildError`.
    """
    try:
        path = library_path(compiler, processor, flags)
        if path.is_file():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(dir=path.parent)
    except (OSError, RuntimeError):  # the latter: the user has no home
        path = Path(tempfile.mkdtemp(prefix="penstock-")) / _name(compiler, processor, flags)
        scratch = tempfile.TemporaryDirectory(dir=path.parent)
    with scratch as folder:
        made = Path(folder) / "library.so"
        _make(compiler, made, flags)
        made.replace(path)
    return path


def _make(compiler: str, output: Path, flags: Sequence[str]) -> None:
    """Compile the units, as many at a time as there are processors, and link them."""
    objects = [str(output.with_name(f"{number}.o")) for number in range(len(UNITS))]

    def compile_unit(unit: tuple[str, ...], made: str) -> None:
        source, *own = unit
        _run(compiler, [*flags, *own, "-c", str(SOURCES / source), "-o", made])

    with ThreadPoolExecutor(min(len(UNITS), os.cpu_count() or 1)) as pool:
        list(pool.map(compile_unit, UNITS, objects))  # raises what the first of them raised
    _run(compiler, [*flags, "-shared", *objects, "-o", str(output)])
    if not output.is_file():
        raise BuildError(f"{compiler} wrote no library.")


def _run(compiler: str, arguments: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            [compiler, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{compiler} cannot be run: {error}.") from error
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
        raise BuildError(f"{compiler} fails: {(lines or ['no message'])[0].strip()}")
