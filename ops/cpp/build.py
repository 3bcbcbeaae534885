"""Compiles the C++ kernels for this processor, once.

The library is plain C++ without torch's headers, and its units are compiled in parallel, so a build takes seconds. The
file name in the user's cache contains a hash of the sources, the compiler and the processor. Different machines can
therefore share a home directory.
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
# The unit that takes longest comes first.
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
TIMEOUT_S = 300  # seconds per compiled unit
DIGEST_BYTES = 32  # the SHA-256 digest at the end of a library's file


class BuildError(RuntimeError):
    """The kernels cannot be compiled on this machine. The message gives the reason."""


def library_path(compiler: str, processor: Collection[str], flags: Sequence[str] = FLAGS) -> Path:
    """Return the path of the library for this compiler and processor. The file may not exist yet."""
    return cache_folder("cpp") / _name(SOURCES, compiler, processor, flags)


def build(compiler: str, processor: Collection[str], flags: Sequence[str] = FLAGS) -> Path:
    """Return the path of the compiled library. Compiles it, for some seconds, if the cache does not have it.

    One process compiles at a time; other processes wait and use its result. A failed build is retried once. If the
    cache is not writable, a folder of this user in the temporary directory replaces it. Raises `BuildError`.
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
    """Return a folder that later processes of this user find, and that no other user can write to.

    Files in it are loaded as code. Raises `BuildError` if another user owns the folder or may write to it.
    """
    folder = Path(tempfile.gettempdir()) / f"penstock-kernels-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        facts = folder.lstat()
    except OSError as error:
        raise BuildError(f"Cannot write to the cache ({reason}) or to {folder}: {error}.") from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid() or facts.st_mode & 0o022:
        raise BuildError(f"Cannot write to the cache ({reason}), and other users may write to {folder}.")
    logger.warning(
        "Cannot write to the cache of compiled kernels (%s). Using %s instead. Set XDG_CACHE_HOME to a writable "
        "folder.",
        reason,
        folder,
    )
    return folder


def _name(sources: Path, compiler: str, processor: Collection[str], flags: Sequence[str]) -> str:
    """Return the name of the library's file. Path, size and time identify the compiler's version."""
    try:
        program = Path(shutil.which(compiler) or compiler).resolve(strict=True)
        facts = program.stat()
    except OSError as error:
        raise BuildError(f"Cannot run {compiler}: {error}.") from error
    digest = hashlib.sha256()
    for source in _sources(sources):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    key = [str(program), str(facts.st_size), str(facts.st_mtime_ns), *UNITS, *flags, *sorted(processor)]
    digest.update("\0".join(key).encode())
    return f"kernels-{digest.hexdigest()[:24]}.so"


def _sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".h"))


def _is_whole(path: Path) -> bool:
    """Return whether the file exists and is complete. Loading an incomplete library can crash the process."""
    try:
        content = memoryview(path.read_bytes())
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def _locked(folder: Path) -> IO[bytes]:
    """Lock the folder until the returned file is closed. Waits for other processes that hold the lock."""
    import fcntl  # does not exist on Windows, which has no C++ kernels

    file = (folder / "lock").open("ab")
    fcntl.flock(file, fcntl.LOCK_EX)
    return file


def _make(folder: Path, compiler: str, processor: Collection[str], flags: Sequence[str]) -> Path:
    """Compile a copy of the sources into the folder. The name of the library contains a hash of this copy."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        sources = Path(scratch)
        for source in _sources(SOURCES):
            shutil.copyfile(source, sources / source.name)
        path = folder / _name(sources, compiler, processor, flags)
        try:
            library = _compile(compiler, flags, sources, os.cpu_count() or 1)
        except BuildError as error:  # for example out of memory, or a timeout
            logger.warning("Cannot compile the C++ kernels in parallel. Trying one unit at a time: %s", error)
            library = _compile(compiler, flags, sources, 1)
        with library.open("r+b") as file:
            file.write(hashlib.sha256(file.read()).digest())
            file.flush()
            os.fsync(file.fileno())
        library.replace(path)
    _sync(folder)
    return path


def _sync(folder: Path) -> None:
    """Flush the folder's directory entries to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _compile(compiler: str, flags: Sequence[str], sources: Path, parallel: int) -> Path:
    """Compile the units, `parallel` at a time, and link them. The library is in the folder of the sources."""
    objects = [str(sources / f"{number}.o") for number in range(len(UNITS))]

    def compile_unit(unit: str, output: str) -> None:
        _run(compiler, [*flags, "-c", str(sources / unit), "-o", output])

    with ThreadPoolExecutor(min(len(UNITS), parallel)) as pool:
        list(pool.map(compile_unit, UNITS, objects))  # the list raises the first unit's exception
    library = sources / "library.so"
    _run(compiler, [*flags, "-shared", *objects, "-o", str(library)])
    if not library.is_file():
        raise BuildError(f"{compiler} did not write a library.")
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
            process_group=0,  # so that a timeout also ends the compiler's child processes
        )
    except OSError as error:
        raise BuildError(f"Cannot run {compiler}: {error}.") from error
    with process:
        try:
            _, output = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"Cannot run {compiler}: {error}.") from error
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        lines = [line for line in output.splitlines() if "error" in line] or output.splitlines()
        raise BuildError(f"{compiler} failed: {(lines or ['no message'])[0].strip()}")
