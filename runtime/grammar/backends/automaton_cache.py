"""Cache of automata on disk. Building an automaton takes seconds; reading it takes milliseconds."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from ops.machine import cache_folder

logger = logging.getLogger("penstock.grammar")

MAX_FILE_BYTES = 256 * 1024 * 1024
MAX_BYTES = 2 * 1024 * 1024 * 1024
DIGEST_BYTES = 32


class AutomatonCache:
    """A folder with one file per automaton, named by the hash of its key. Several processes may share the folder.

    Each file begins with the SHA-256 of its content, so that damaged files are detected.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_folder("automata")

    def get(self, key: Iterable[bytes]) -> bytes | None:
        """Return the cached content for this key, or None if it is missing or damaged."""
        path = self._path(key)
        try:
            content = path.read_bytes()
            os.utime(path)  # marks the file as used: `_shrink` deletes the least recently used files
        except OSError:
            return None
        digest, found = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        return found if hashlib.sha256(found).digest() == digest else None

    def put(self, key: Iterable[bytes], content: bytes) -> None:
        """Store the content. Do nothing if it is too large. Log a warning if it cannot be written."""
        if len(content) > MAX_FILE_BYTES:
            return
        path = self._path(key)
        fresh = path.with_suffix(f".{os.getpid()}")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            fresh.write_bytes(hashlib.sha256(content).digest() + content)
            fresh.replace(path)
            self._shrink()
        except OSError as error:
            logger.warning("An automaton cannot be cached in %s: %s", self._folder, error)
            with suppress(OSError):
                fresh.unlink()

    def _path(self, key: Iterable[bytes]) -> Path:
        digest = hashlib.sha256()
        for part in key:
            digest.update(len(part).to_bytes(8, "little") + part)
        return self._folder / f"{digest.hexdigest()}.automaton"

    def _shrink(self) -> None:
        files = sorted(
            ((found.stat(), found) for found in self._folder.glob("*.automaton")),
            key=lambda each: each[0].st_mtime,
            reverse=True,
        )
        total = 0
        for stat, path in files:
            total += stat.st_size
            if total > MAX_BYTES:
                with suppress(OSError):
                    path.unlink()
