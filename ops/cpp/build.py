"""Compiles the C++ kernels for this processor, once.

A build takes seconds, because the library is plain C++ without torch's headers, and its source files are compiled in
parallel. The user's cache holds the library under a name with a hash of the sources, the compiler and the processor, so
different machines can share a home directory.
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
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import IO, Self

from ops.machine import cache_folder
from ops.progress import progress_bar

logger = logging.getLogger("penstock.kernels")

SOURCES = Path(__file__).with_name("source")
# Source files that are compiled in parallel, the one that takes longest first.
UNITS = ("quantized.cpp", "kernels.cpp", "attention.cpp", "products.cpp", "library.cpp")
COMMON_FLAGS = ("-O3", "-std=c++20", "-pthread", "-ffp-contract=fast", "-fPIC", "-Wno-psabi")
FLAGS = (*COMMON_FLAGS, "-march=native")
TIMEOUT_S = 300  # seconds per compiled unit
SCRATCH = "build-"  # prefix of the folders in which units are compiled
LOCK_POLL_S = 0.1
# Shell script that runs a command, and kills the command's process group when standard input ends. Standard input is
# the reading end of a `Lifeline`.
WATCHED = 'exec 3<&0 </dev/null; { read -r _ <&3; kill -9 0; } >/dev/null 2>&1 & exec "$@" 3<&-'
DIGEST_BYTES = 32  # the SHA-256 digest at the end of a library's file


class BuildError(RuntimeError):
    """The kernels cannot be compiled on this machine. The message gives the reason."""


class BuildStopped(RuntimeError):
    """The build was stopped by `Lifeline.cut`."""


class Lifeline:
    """A pipe that ties the compilers of a build to this process. When its writing end closes, the compilers are killed.

    Only this process has the writing end. `cut`, which any thread may call, closes this end, and so does the system if
    this process is killed.
    """

    def __init__(self, *, in_background: bool = False) -> None:
        self.reader, self._writer = os.pipe()
        self.in_background = in_background  # whether the compilers run at low priority
        self.is_cut = False
        self.build_s = 0.0  # seconds spent compiling, or waiting for another process to compile

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.cut()
        os.close(self.reader)

    def cut(self) -> None:
        """Stop the build: the running call of `build` raises `BuildStopped`."""
        if not self.is_cut:
            self.is_cut = True
            os.close(self._writer)

    def check(self) -> None:
        """Raise `BuildStopped` if the lifeline is cut."""
        if self.is_cut:
            raise BuildStopped("The compilation of the C++ kernels was stopped.")


def library_path(compiler: str, processor: Collection[str], flags: Sequence[str] = FLAGS) -> Path:
    """Return the path of the library for this compiler and processor. The file may not exist yet."""
    return cache_folder("cpp") / _name(SOURCES, compiler, processor, flags)


def build(
    compiler: str, processor: Collection[str], flags: Sequence[str] = FLAGS, lifeline: Lifeline | None = None
) -> Path:
    """Return the path of the compiled library. If the cache does not have the library, compile it, which takes seconds.

    Only one process compiles at a time; the others wait and use its result. A failed build is retried once. If the
    cache is not writable, a folder of this user in the temporary directory replaces the cache. Raises `BuildError` if
    the build fails, and `BuildStopped` after `lifeline` is cut.
    """
    if lifeline is None:
        with Lifeline() as own:
            return build(compiler, processor, flags, own)
    name = _name(SOURCES, compiler, processor, flags)
    try:
        path = cache_folder("cpp") / name
        if is_whole(path):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _open_lock(path.parent)
    except (OSError, RuntimeError) as reason:
        path = _spare_directory(reason) / name
        lock = _open_lock(path.parent)
    began = time.monotonic()
    with lock:
        _take(lock, lifeline)
        _remove_scratch(path.parent)
        if is_whole(path):
            lifeline.build_s = time.monotonic() - began
            return path
        logger.info(
            "Compiling CPU kernels for this processor, once: about 20 s on two cores. Later starts load them from %s.",
            path.parent,
        )
        made = make(path.parent, lambda sources: _name(sources, compiler, processor, flags), compiler, flags, lifeline)
        lifeline.build_s = time.monotonic() - began
        logger.info("Compiled CPU kernels in %.0f s.", lifeline.build_s)
        return made


def _spare_directory(reason: Exception) -> Path:
    """Return a folder in the temporary directory for this user's libraries, always the same one.

    Its files are loaded as code. Raises `BuildError` if another user owns the folder or may write to it.
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
    """Return the name of the library's file, which contains a hash of all inputs of the build.

    The path, size and modification time of the compiler's program stand for its version.
    """
    try:
        program = Path(shutil.which(compiler) or compiler).resolve(strict=True)
        facts = program.stat()
    except OSError as error:
        raise BuildError(f"Cannot run {compiler}: {error}.") from error
    digest = hashlib.sha256()
    for source in source_files(sources):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    key = [str(program), str(facts.st_size), str(facts.st_mtime_ns), *UNITS, *flags, *sorted(processor)]
    digest.update("\0".join(key).encode())
    return f"kernels-{digest.hexdigest()[:24]}.so"


def source_files(folder: Path) -> list[Path]:
    """Return the C++ files of a folder, sorted. Hashes of the sources depend on this order."""
    return sorted(path for path in folder.iterdir() if path.suffix in (".cpp", ".h"))


def is_whole(path: Path) -> bool:
    """Return whether the file exists and is complete. Loading an incomplete library can crash the process."""
    try:
        content = memoryview(path.read_bytes())
    except FileNotFoundError:
        return False
    return hashlib.sha256(content[:-DIGEST_BYTES]).digest() == content[-DIGEST_BYTES:]


def _open_lock(folder: Path) -> IO[bytes]:
    return (folder / "lock").open("ab")


def _take(lock: IO[bytes], lifeline: Lifeline) -> None:
    """Lock the file until it is closed. If another process holds the lock, wait."""
    import fcntl  # does not exist on Windows, which has no C++ kernels

    while True:
        lifeline.check()
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOCK_POLL_S)


def _remove_scratch(folder: Path) -> None:
    """Delete the scratch folders that killed builds have left. The caller must hold the lock of `folder`."""
    for scratch in folder.glob(f"{SCRATCH}*"):
        shutil.rmtree(scratch, ignore_errors=True)


def make(folder: Path, name: Callable[[Path], str], compiler: str, flags: Sequence[str], lifeline: Lifeline) -> Path:
    """Compile a copy of the sources into `folder`, and return the library's path.

    `name` maps the folder of the copy to the library's file name. Raises `BuildError` if the build fails, and
    `BuildStopped` after `lifeline` is cut.
    """
    with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder, ignore_cleanup_errors=True) as scratch:
        sources = Path(scratch)
        for source in source_files(SOURCES):
            shutil.copyfile(source, sources / source.name)
        path = folder / name(sources)
        try:
            library = _compile(compiler, flags, sources, os.cpu_count() or 1, lifeline)
        except BuildError as error:  # for example out of memory, or a timeout
            logger.warning("Cannot compile the C++ kernels in parallel. Trying one unit at a time: %s", error)
            library = _compile(compiler, flags, sources, 1, lifeline)
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


def _compile(compiler: str, flags: Sequence[str], sources: Path, parallel: int, lifeline: Lifeline) -> Path:
    """Compile the source files, `parallel` at a time, and link them. Return the library's path, next to the sources."""
    objects, done = [str(sources / f"{number}.o") for number in range(len(UNITS))], count(1)

    def compile_unit(unit: str, output: str) -> None:
        _run([compiler, *flags, "-c", str(sources / unit), "-o", output], lifeline)
        logger.info("Compiling CPU kernels: %d of %d files are done.", next(done), len(UNITS))
        if bar is not None:
            bar.update()

    with (
        progress_bar(len(UNITS), "Compiling CPU kernels", unit="file", quiet_s=0) as bar,
        ThreadPoolExecutor(min(len(UNITS), parallel)) as pool,
    ):
        list(pool.map(compile_unit, UNITS, objects))  # `list` waits, and raises the exception of the first failed unit
    library = sources / "library.so"
    _run([compiler, *flags, "-shared", *objects, "-o", str(library)], lifeline)
    if not library.is_file():
        raise BuildError(f"{compiler} did not write a library.")
    return library


def _run(command: Sequence[str], lifeline: Lifeline) -> None:
    """Run a compiler in a process group that ends after `TIMEOUT_S`, or when the lifeline is cut."""
    compiler = command[0]
    lifeline.check()
    nice = ("nice", "-n", "19") if lifeline.in_background and shutil.which("nice") else ()
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", WATCHED, "sh", *nice, *command],
            stdin=lifeline.reader,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            process_group=0,  # the compiler, its child processes and the shell that watches the lifeline
        )
    except OSError as error:
        raise BuildError(f"Cannot run {compiler}: {error}.") from error
    with process:
        try:
            _, output = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise BuildError(f"Cannot run {compiler}: {error}.") from error
        finally:
            with suppress(ProcessLookupError):  # raised if the shell script has already killed the group
                os.killpg(process.pid, signal.SIGKILL)
    lifeline.check()
    if process.returncode != 0:
        lines = [line for line in output.splitlines() if "error" in line] or output.splitlines()
        raise BuildError(f"{compiler} failed: {(lines or ['no message'])[0].strip()}")
