"""A page store in a folder, which several servers may share.

Each page is a file. It is written under a temporary name and then renamed, so a reader sees the whole file or none,
even if the writer is killed. The size of the folder is limited. Whenever a server has written a certain share of this
limit, it adds up the sizes of all files. If they exceed the limit, it deletes the least recently used files.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from ops.machine import cache_folder
from runtime.errors import ConfigurationError
from runtime.page_store.protocol import StoreSpace

logger = logging.getLogger("penstock.core")

PATH_VARIABLE = "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"
DEFAULT_MAX_GB = 20.0
FREE_SHARE = 0.5  # without `max_gb`, the limit of the folder is this share of the file system's free space
SCAN_SHARE = 0.05  # a server adds up the sizes of the files whenever it has written this share of the limit
KEPT_SHARE = 0.9  # after a deletion, the files take at most this share of the limit
OLD_S = 86_400.0  # age in seconds at which unfinished files of other machines are deleted

_numbers = count()


def store_folder(config: Mapping[str, Any]) -> Path:
    """Return the folder that the settings name, or else the default folder."""
    path = config.get("path") or os.environ.get(PATH_VARIABLE)
    return Path(path).expanduser() if path else cache_folder("pages")


class FileStore:
    """Pages of one space as files in a folder. Implements `PageStore`."""

    def __init__(self, space: StoreSpace, config: Mapping[str, Any]) -> None:
        """Open the folder. Creates it if necessary. Raises `ConfigurationError` if it is not writable."""
        self.root = store_folder(config)
        self._space = space
        self._folder = self.root / space.name / f"{space.rank}-of-{space.num_ranks}"
        self._partial = self.root / "partial"
        try:
            self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self._folder, self._partial):
                folder.mkdir(parents=True, exist_ok=True)
            self._delete_partial()
            free_bytes = shutil.disk_usage(self.root).free
        except OSError as error:
            raise ConfigurationError(f"The folder {self.root} of stored pages cannot be used: {error}.") from error
        asked = config.get("max_gb")
        held = sum(size for _, size, _ in self._files()) if asked is None else 0
        limit = min(DEFAULT_MAX_GB * 10**9, held + FREE_SHARE * free_bytes) if asked is None else asked * 10**9
        self.max_bytes = int(limit)
        self._lock = threading.Lock()
        self._written = self.max_bytes  # bytes written since the last scan; this value makes the first write scan

    def exists(self, keys: Sequence[bytes]) -> int:
        for number, key in enumerate(keys):
            if not os.path.exists(self._path(key)):
                return number
        return len(keys)

    def get(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        try:
            file = os.open(self._path(key), os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            size = sum(len(part) for part in parts)
            if os.fstat(file).st_size != size or _read(file, parts) != size:
                return False
            with suppress(OSError):  # the folder may be read-only
                os.utime(file)
        finally:
            os.close(file)
        return True

    def set(self, key: bytes, parts: Sequence[memoryview | bytes]) -> None:
        size = sum(len(part) for part in parts)
        self._make_room(size)
        path = self._path(key)
        partial = str(self._partial / f"{socket.gethostname()}-{os.getpid()}-{next(_numbers)}")
        try:
            file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                if os.writev(file, parts) != size:
                    raise OSError(errno.ENOSPC, "The file was written in part.")
            finally:
                os.close(file)
            try:
                os.rename(partial, path)
            except FileNotFoundError:  # the folder of this page's key prefix does not exist yet
                os.makedirs(os.path.dirname(path), exist_ok=True)
                os.rename(partial, path)
        except OSError:
            with suppress(OSError):
                os.unlink(partial)
            raise

    def delete(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            with suppress(OSError):
                os.unlink(self._path(key))

    def clear(self) -> None:
        for _, _, path in _walk(self._folder):
            with suppress(OSError):
                os.unlink(path)

    def close(self) -> None:
        return

    def _path(self, key: bytes) -> str:
        name = key.hex()
        return f"{self._folder}/{name[:2]}/{name}"

    def _delete_partial(self) -> None:
        """Delete the unfinished files of processes that have ended."""
        host = socket.gethostname()
        for path in self._partial.iterdir():
            name, _, rest = path.name.rpartition("-")
            owner, _, process = name.rpartition("-")
            with suppress(OSError, ValueError):
                if owner == host and rest:
                    if not _is_alive(int(process)):
                        path.unlink()
                elif time.time() - path.stat().st_mtime > OLD_S:
                    path.unlink()

    def _make_room(self, num_bytes: int) -> None:
        """If the folder may exceed its limit, scan it and delete the least recently used files."""
        with self._lock:
            self._written += num_bytes
            if self._written < SCAN_SHARE * self.max_bytes:
                return
            self._written = num_bytes
            try:
                lock = os.open(self.root / "lock", os.O_RDWR | os.O_CREAT, 0o600)
                try:
                    # With this lock, only one of the servers that share the folder deletes files at a time.
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    self._delete_oldest(num_bytes)
                finally:
                    os.close(lock)
            except OSError as error:
                logger.warning("The size of the folder %s could not be limited: %s.", self.root, error)

    def _delete_oldest(self, num_bytes: int) -> None:
        files = sorted(self._files())
        total = sum(size for _, size, _ in files) + num_bytes
        if total + SCAN_SHARE * self.max_bytes <= self.max_bytes:
            return
        for _, size, path in files:
            if total <= KEPT_SHARE * self.max_bytes - SCAN_SHARE * self.max_bytes:
                return
            with suppress(FileNotFoundError):  # another server has deleted it
                os.unlink(path)
            total -= size

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """Yield (time of last use, bytes, path) of every page in the folder, in all spaces."""
        yield from _walk(self.root)


def _walk(folder: str | Path) -> Iterator[tuple[float, int, str]]:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        with suppress(OSError):  # another server has deleted the file
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path)
            elif len(entry.name) == 64:
                status = entry.stat(follow_symlinks=False)
                yield status.st_mtime, status.st_size, entry.path


def _read(file: int, parts: Sequence[memoryview]) -> int:
    """Read from a file into the buffers until they are full or the file ends. Return the number of bytes."""
    total = os.readv(file, parts)
    whole = sum(len(part) for part in parts)
    while total < whole:  # a single call may read less, for example at most 2 GiB
        start, rest = total, []
        for part in parts:
            rest += [part[start:]] if start < len(part) else []
            start = max(0, start - len(part))
        more = os.readv(file, rest)
        if not more:
            break
        total += more
    return total


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
