"""Files of `/v1/files` in one local folder, each beside a description of it in JSON."""

from __future__ import annotations

import logging
import os
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any
from uuid import uuid4

import orjson
from starlette.requests import Request as HttpRequest

from runtime.errors import NotFound, NotSupported, PayloadTooLarge

logger = logging.getLogger("penstock.http")

MAX_FILES = 4096
MAX_FOLDER_BYTES = 8 * 1024**3
ORPHAN_S = 48 * 3600  # content without a description is still being written until it is that old

_ID = re.compile(r"file-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileObject:
    """A file as the API describes it; `owner` is the name of the key that it belongs to."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    owner: str = ""

    def shown(self) -> dict[str, Any]:
        """The API's object."""
        shown = asdict(self) | {"object": "file", "status": "processed"}
        del shown["owner"]
        return shown


class FileStore:
    """Files in a folder, for threads. A client sees those of its own key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._adding = Lock()  # what looks for room has taken it before another looks

    @staticmethod
    def of(http: HttpRequest) -> FileStore:
        """The application's. Raises `NotSupported` where the server has no folder for files."""
        if http.app.state.files is None:
            raise NotSupported("Files and batches need a folder: start the server with --file-storage-path.")
        return http.app.state.files

    def path(self, file_id: str) -> Path:
        """Where the content of a file lies; `file_id` is one of ours."""
        return self.folder / file_id

    def room(self) -> int:
        """Bytes that may still be written. Raises `PayloadTooLarge` where there is room for none.

        Everything of ours in the folder counts, described or not. What a server that was killed left without a
        description is deleted.
        """
        names: set[str] = set()
        left, now = MAX_FOLDER_BYTES, time.time()
        for entry in os.scandir(self.folder) if self.folder.is_dir() else ():
            if not _ID.match(entry.name):
                continue
            try:
                stat = entry.stat()
                orphan = not entry.name.endswith(".json") and not self._description(entry.name).exists()
                if orphan and now - stat.st_mtime > ORPHAN_S:
                    os.unlink(entry)
                    continue
            except FileNotFoundError:  # deleted meanwhile
                continue
            names.add(entry.name.partition(".")[0])
            left -= stat.st_size
        if left <= 0 or len(names) >= MAX_FILES:
            raise PayloadTooLarge("The server's folder of files is full; delete some.")
        return left

    def add(self, filename: str, purpose: str, content: bytes | memoryview, owner: str) -> FileObject:
        """Keep a file. Raises `PayloadTooLarge` where there is no room for it."""
        made = self.new(filename, purpose, owner)
        with self._adding:
            if len(content) > self.room():
                raise PayloadTooLarge("The server's folder of files has no room for this one; delete some.")
            try:
                self.path(made.id).write_bytes(content)
            except BaseException:  # a disk that is full, perhaps
                self.path(made.id).unlink(missing_ok=True)
                raise
            return self.keep(made)

    def new(self, filename: str, purpose: str, owner: str) -> FileObject:
        """A file that is still to be written and kept."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return FileObject(
            id=f"file-{uuid4().hex}",
            bytes=0,
            created_at=int(time.time()),
            filename=filename[:255],
            purpose=purpose,
            owner=owner,
        )

    def keep(self, made: FileObject) -> FileObject:
        """Describe a file whose content has been written. Where that fails its content goes too."""
        unfinished = self.path(f"{made.id}.json.new")
        try:
            made = replace(made, bytes=self.path(made.id).stat().st_size)
            unfinished.write_bytes(orjson.dumps(asdict(made)))
            os.replace(unfinished, self._description(made.id))  # others read it whole or not at all
        except BaseException:
            unfinished.unlink(missing_ok=True)
            self.path(made.id).unlink(missing_ok=True)
            raise
        return made

    def get(self, file_id: str, owner: str) -> FileObject:
        """Raises `NotFound` for what is not there, or another client's."""
        found = self._read(self._description(file_id)) if _ID.fullmatch(file_id) else None
        if found is None or found.owner != owner:
            raise NotFound(f"No file has the id {file_id[:80]}.", param="file_id")
        return found

    def delete(self, file_id: str, owner: str) -> None:
        """Raises `NotFound` as `get`."""
        self.get(file_id, owner)
        self._description(file_id).unlink(missing_ok=True)
        self.path(file_id).unlink(missing_ok=True)

    def all_files(self) -> list[FileObject]:
        """Of every client, oldest first. Descriptions that cannot be read are left out."""
        found = [self._read(path) for path in self.folder.glob("file-*.json")]
        return sorted((each for each in found if each), key=lambda each: (each.created_at, each.id))

    def _description(self, file_id: str) -> Path:
        return self.path(f"{file_id}.json")

    def _read(self, path: Path) -> FileObject | None:
        try:
            return FileObject(**orjson.loads(path.read_bytes()))
        except FileNotFoundError:  # deleted meanwhile
            return None
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s is left out: %s", path, error)
            return None
