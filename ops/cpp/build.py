"""Compiling the C++ kernels for this processor, once.

The library is plain C++ without torch's headers, and its units are compiled at the same time, so it takes seconds. It
is kept in the user's cache under a name made of its sources, the compiler and the processor: another machine on the
same home directory makes its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from ops.machine import cache_folder

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).with_name("source")
# What takes longest comes first.
UNITS = ("quantized.cpp", "kernels.cpp", "attention.cpp", "products.cpp", "library.cpp")
FLAGS = (
    "-O3",
    "-march=native",
    "-std=c++20",
    "-pthread",
    "-ffp-contract=fast",
    "-fPIC",
    "-Wno-psabi",
)
TIMEOUT_S = 300  # of one unit
DIGEST_BYTES = 32  # of the SHA-256 that follows a library in its file


class BuildError(RuntimeError):
    """The kernels cannot be compiled here; the message says why."""


def library_path(compiler: str, processor: Collection[str], flags: Sequence[str] = FLAGS) -> Path:
    """Where the library for this compiler and a processor of these flags is, or will be."""
    return cache_folder("cpp") / _name(SOURCES, compiler, processor, flags)


def build(compiler: str, processor: Collection[str], flags: Sequence[str] = FLAGS) -> Path:
    """The compiled library, from the cache where it is there. Blocks for some seconds where it is not.

    One process compiles at a time, others wait for it and take what it made. A build that fails is tried once more.
    Where the cache cannot be written, the user's folder among the temporary files is the cache. Raises `BuildError`.
    """
    name = _name(SOURCES, compiler, processor, flags)
    try:
        path = cache_folder("cpp") / name
        if _is_whole(path):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _locked(path.parent)
    except (OSError, RuntimeError) as reason:
        path = _spare_directory(reason) / name
        lock = _locked(path.parent)
    with lock:
        return path if _is_whole(path) else _make(path.parent, compiler, processor, flags)


def _spare_directory(reason: Exception) -> Path:
    """A folder that later starts of this user find again, and that nobody else can write to.

    What lies in it is loaded as code. Raises `BuildError` where another user holds the name.
    """
    folder = Path(tempfile.gettempdir()) / f"penstock-kernels-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
    except OSError as error:
        raise BuildError(f"Neither the cache ({reason}) nor {folder} can be written: {error}.") from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise BuildError(f"The cache cannot be written ({reason}), and {folder} is not this user's alone.")
    logger.warning(
        "The cache of compiled kernels cannot be written (%s); %s is used. Set XDG_CACHE_HOME to a folder that "
        "can be written.",
        reason,
        folder,
    )
    return folder


def _name(sources: Path, compiler: str, processor: Collection[str], flags: Sequence[str]) -> str:
    """Of the library's file. A compiler is known by its path, size and time, which change with its version."""
    try:
        program = Path(shutil.which(compiler) or compiler).resolve(strict=True)
        facts = program.stat()
    except OSError as error:
        raise BuildError(f"{compiler} cannot be run: {error}.") from error
    digest = hashlib.sha256()
    for source in _sources(sources):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    key = [str(program), str(facts.st_size), str(facts.st_mtime_ns), *UNITS, *flags, *sorted(processor)]
    digest.update("\0".join(key).encode())
    return f"kernels-{digest.hexdigest()[:24]}.so"


def _sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".h"))


def _is_whole(path: Path) -> bool:
    """Whether the file is there as it was written: loading a part of a library can end the process."""
    try:
        content = memoryview(path.read_bytes())
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def _locked(folder: Path) -> IO[bytes]:
    """Wait until no other process compiles into the folder; others wait until the file is closed."""
    import fcntl  # not on Windows, for which there are no kernels in C++

    file = (folder / "lock").open("ab")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _make(folder: Path, compiler: str, processor: Collection[str], flags: Sequence[str]) -> Path:
    """Compile a copy of the sources into the folder -> the library, named after what was compiled."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        sources = Path(scratch)
        for source in _sources(SOURCES):
            shutil.copyfile(source, sources / source.name)
        path = folder / _name(sources, compiler, processor, flags)
        try:
            made = _compile(compiler, flags, sources, os.cpu_count() or 1)
        except BuildError as error:  # killed for want of memory, say, or out of time
            logger.warning("Compiling the kernels in C++ is tried again, one unit at a time: %s", error)
            made = _compile(compiler, flags, sources, 1)
        with made.open("r+b") as file:
            file.write(hashlib.sha256(file.read()).digest())
            file.flush()
            os.fsync(file.fileno())
        made.replace(path)
    _sync(folder)
    return path


def _sync(folder: Path) -> None:
    """Write a folder's names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _compile(compiler: str, flags: Sequence[str], sources: Path, parallel: int) -> Path:
    """Compile the units, so many at a time, and link them -> the library, beside its sources."""
    objects = [str(sources / f"{number}.o") for number in range(len(UNITS))]

    def compile_unit(unit: str, made: str) -> None:
        _run(compiler, [*flags, "-c", str(sources / unit), "-o", made])

    with ThreadPoolExecutor(min(len(UNITS), parallel)) as pool:
        list(pool.map(compile_unit, UNITS, objects))  # raises what the first of them raised
    library = sources / "library.so"
    _run(compiler, [*flags, "-shared", *objects, "-o", str(library)])
    if not library.is_file():
        raise BuildError(f"{compiler} wrote no library.")
    return library


def _run(compiler: str, arguments: Sequence[str]) -> None:
    try:
        process = subprocess.Popen(
            [compiler, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,  # with the programs that it starts, which do not end with it
        )
    except OSError as error:
        raise BuildError(f"{compiler} cannot be run: {error}.") from error
    with process:
        try:
            _, output = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"{compiler} cannot be run: {error}.") from error
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        lines = [line for line in output.splitlines() if "error" in line] or output.splitlines()
        raise BuildError(f"{compiler} fails: {(lines or ['no message'])[0].strip()}")
