"""The folder of `--lora-dir`. Its adapters are loaded when requests name them."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from pathlib import Path

from runtime.errors import CheckpointError
from runtime.loading import remote
from runtime.loading.adapter_config import CONFIG
from runtime.loading.checkpoint import locate

logger = logging.getLogger("penstock.core")

REFRESH_S = 30.0  # minimum time between two listings of an object store
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")


class AdapterFolder:
    """Finds adapters by name in a local folder or in a folder of an object store (`s3://bucket/folder`).

    Names with path separators and symbolic links are rejected, so a name cannot reach files outside the folder. An
    object store is listed at the start, and then at most every `REFRESH_S` seconds, so unknown names cause little
    traffic.
    """

    def __init__(self, path: str, download_dir: str | None) -> None:
        """Create the finder.

        Adapters of an object store are copied to `download_dir`, or to the user's cache if it is None.
        """
        self.path = path
        self._download_dir = download_dir
        self._in_store: frozenset[str] = frozenset()
        self._listed_s = 0.0
        self._listing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """List the object store, if `path` names one. Raises CheckpointError if it cannot be read."""
        if remote.is_url(self.path):
            await self._list()

    def find(self, name: str) -> str | None:
        """Return the path or URL of the adapter with this name, or None if the folder has no such adapter."""
        if not _NAME.fullmatch(name):
            return None
        if not remote.is_url(self.path):
            path = Path(self.path, name)
            return None if path.is_symlink() or not (path / CONFIG).is_file() else str(path)
        if name in self._in_store:
            return f"{self.path.rstrip('/')}/{name}"
        if self._listing is None and time.monotonic() - self._listed_s > REFRESH_S:
            self._listing = asyncio.create_task(self._refresh())
        return None

    async def fetched(self, path: str) -> str:
        """Return the local folder of an adapter, given the path or URL that `find` returned.

        If the adapter is in an object store, it is copied first. Raises CheckpointError if this fails.
        """
        return await asyncio.to_thread(locate, path, None, self._download_dir) if remote.is_url(path) else path

    async def _list(self) -> None:
        self._in_store = frozenset(await asyncio.to_thread(remote.folders_with, self.path, CONFIG))
        self._listed_s = time.monotonic()

    async def _refresh(self) -> None:
        try:
            await self._list()
        except CheckpointError as error:
            self._listed_s = time.monotonic()
            logger.warning("--lora-dir: %s", error)
        finally:
            self._listing = None
