"""The folder of a rendezvous file. If an engine was killed, another engine removes its folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "penstock-"
LOCK = "lock"


class RendezvousFolder:
    """A folder that only this user can read. A lock on a file in it shows other engines that its owner is alive."""

    def __init__(self) -> None:
        remove_abandoned()
        self._path = Path(tempfile.mkdtemp(prefix=PREFIX))
        created = self._path / "new"
        self._lock = created.open("xb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        created.rename(self._path / LOCK)  # with this name, the folder counts as abandoned unless the lock is held

    @property
    def store(self) -> str:
        """Path of the file over which the ranks connect."""
        return str(self._path / "store")

    def remove(self) -> None:
        """Remove the folder and its contents."""
        shutil.rmtree(self._path, ignore_errors=True)
        self._lock.close()


def remove_abandoned() -> None:
    """Remove this user's folders whose owners have ended, that is, whose locks are free."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{LOCK}"):
        try:
            if path.lstat().st_uid != os.getuid():
                continue
            with path.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
        except OSError:  # another engine uses the folder, or has removed it meanwhile
            continue
