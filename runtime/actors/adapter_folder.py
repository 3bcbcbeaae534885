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

REFRESH_S = 30.0  # minimum time between two listings of a store
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,127}")


class AdapterFolder:
    """Finds adapters by name in a local folder or in a folder of a store (`s3://bucket/folder`).

    A name cannot lead out of the folder, and symbolic links are not followed. A store is listed at the start, and after
    that at most every `REFRESH_S` seconds, so unknown names cause little traffic.
    """

    def __init__(self, path: str, download_dir: str | None) -> None:
        """Adapters of a store are copied to `download_dir`. If it is None, they are copied to the user's cache."""
        self.path = path
        self._download_dir = download_dir
        self._in_store: frozenset[str] = frozenset()
        self._listed_s = 0.0
        self._listing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """List the store. Raises CheckpointError if it cannot be read."""
        if remote.is_url(self.path):
            await self._list()

    def find(self, name: str) -> str | None:
        """Return the path or URL of the adapter with this name, or None."""
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
        """Return the local folder of an adapter that `find` returned.

        Copies the adapter if necessary. Raises CheckpointError.
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
