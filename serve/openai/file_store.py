"""Storage of `/v1/files` in one local folder: for each file its content, and a JSON file that describes it."""

from __future__ import annotations

import errno
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

from runtime.errors import NotFound, NotSupported, Overloaded, PayloadTooLarge

logger = logging.getLogger("penstock.http")

MAX_FILES = 4096
MAX_FOLDER_BYTES = 8 * 1024**3
# Age in seconds at which content without a description is deleted. Younger content may belong to a running upload.
ORPHAN_S = 48 * 3600

_ID = re.compile(r"file-[0-9a-f]{32}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileObject:
    """A file's fields in the API, and `owner`: the name of the API key that uploaded the file (empty without a key)."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    owner: str = ""

    def shown(self) -> dict[str, Any]:
        """Return the file as the API's JSON object, without the owner."""
        shown = asdict(self) | {"object": "file", "status": "processed"}
        del shown["owner"]
        return shown


DISK_FULL = "The disk of the server's file storage is full; delete some files, or try again later."


class FileStore:
    """Stores files in a folder. A client sees only the files of its own API key. Call the methods in threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._adding = Lock()  # held from the check of the free space to the end of the write
        self._owners: dict[str, str] = {}  # file id -> owner, including incomplete files

    @staticmethod
    def of(http: HttpRequest) -> FileStore:
        """Return the application's store. Raises `NotSupported` if the server has no folder for files."""
        if http.app.state.files is None:
            raise NotSupported("Files and batches require a folder: start the server with --file-storage-path.")
        return http.app.state.files

    def path(self, file_id: str) -> Path:
        """Return the path of a file's content. The caller must check `file_id`, which becomes part of the path."""
        return self.folder / file_id

    def room(self, owner: str) -> int:
        """Return the number of bytes that `owner` may still write. Raises `PayloadTooLarge` if the number is 0.

        A client without a key may write as many bytes as are free. The files of a client with a key may take at most
        as many bytes as are free after the write. Therefore one client can fill half of the folder, and two clients a
        third each.

        Every stored file counts, with or without a description. Old content without a description, which a killed
        server left, is deleted.
        """
        sizes: dict[str, int] = {}
        now = time.time()
        for entry in os.scandir(self.folder) if self.folder.is_dir() else ():
            if not _ID.match(entry.name):
                continue
            try:
                stat = entry.stat()
                orphan = not entry.name.endswith(".json") and not self._description(entry.name).exists()
                if orphan and now - stat.st_mtime > ORPHAN_S:
                    os.unlink(entry)
                    continue
            except FileNotFoundError:  # deleted in the meantime
                continue
            file_id = entry.name.partition(".")[0]
            sizes[file_id] = sizes.get(file_id, 0) + stat.st_size
        free = MAX_FOLDER_BYTES - sum(sizes.values())
        if free <= 0 or len(sizes) >= MAX_FILES:
            raise PayloadTooLarge("The server's file storage is full; delete some files.")
        if not owner:
            return free
        own = [size for file_id, size in sizes.items() if self._owner(file_id) == owner]
        left = (free - sum(own)) // 2  # half, because each byte that the owner writes also reduces `free`
        if left <= 0 or len(own) >= MAX_FILES - len(sizes):
            raise PayloadTooLarge("Your share of the server's file storage is full; delete some of your files.")
        return left

    def _owner(self, file_id: str) -> str:
        if file_id not in self._owners:
            file = self._read(self._description(file_id))
            self._owners[file_id] = file.owner if file else ""
        return self._owners[file_id]

    def add(self, filename: str, purpose: str, content: bytes | memoryview, owner: str) -> FileObject:
        """Store a file.

        Raises `PayloadTooLarge` if the folder has no space for it, and `Overloaded` if the disk is full.
        """
        with self._adding:
            if len(content) > self.room(owner):
                raise PayloadTooLarge("The server's file storage has no space for this file; delete some files.")
            file = self.new(filename, purpose, owner)
            try:
                self.path(file.id).write_bytes(content)
                return self.keep(file)
            except BaseException as error:
                self.discard(file.id)
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    logger.error("Cannot store a file of %d bytes: %s", len(content), error)
                    raise Overloaded(DISK_FULL, retry_after_s=60) from error
                raise

    def new(self, filename: str, purpose: str, owner: str) -> FileObject:
        """Return a new file object. The caller then writes the content to `path`, and calls `keep` or `discard`."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # other users must not read clients' files
        file_id = f"file-{uuid4().hex}"
        self._owners[file_id] = owner
        return FileObject(
            id=file_id,
            bytes=0,
            created_at=int(time.time()),
            filename=filename[:255],
            purpose=purpose,
            owner=owner,
        )

    def keep(self, file: FileObject) -> FileObject:
        """Write the description of a file whose content is already written. If this fails, delete the content."""
        unfinished = self.path(f"{file.id}.json.new")
        try:
            file = replace(file, bytes=self.path(file.id).stat().st_size)
            unfinished.write_bytes(orjson.dumps(asdict(file)))
            # The replacement is atomic: a reader sees the complete description or no description.
            os.replace(unfinished, self._description(file.id))
        except BaseException:
            unfinished.unlink(missing_ok=True)
            self.discard(file.id)
            raise
        return file

    def get(self, file_id: str, owner: str) -> FileObject:
        """Return a file. Raises `NotFound` if it does not exist or belongs to another client."""
        file = self._read(self._description(file_id)) if _ID.fullmatch(file_id) else None
        if file is None or file.owner != owner:
            raise NotFound(f"No file has the id {file_id[:80]}.", param="file_id")
        return file

    def delete(self, file_id: str, owner: str) -> None:
        """Delete a file. Raises `NotFound` if it does not exist or belongs to another client."""
        self.get(file_id, owner)
        self._description(file_id).unlink(missing_ok=True)
        self.discard(file_id)

    def discard(self, file_id: str) -> None:
        """Delete the content of a file. Its description must already be deleted, or was never written."""
        self.path(file_id).unlink(missing_ok=True)
        self._owners.pop(file_id, None)

    def all_files(self) -> list[FileObject]:
        """Return the files of all clients, oldest first. Files with an unreadable description are skipped."""
        files = [self._read(path) for path in self.folder.glob("file-*.json")]
        return sorted((each for each in files if each), key=lambda each: (each.created_at, each.id))

    def _description(self, file_id: str) -> Path:
        return self.path(f"{file_id}.json")

    def _read(self, path: Path) -> FileObject | None:
        try:
            return FileObject(**orjson.loads(path.read_bytes()))
        except FileNotFoundError:  # deleted in the meantime
            return None
        except (OSError, ValueError, TypeError) as error:
            logger.warning("Skipping the file description %s: %s", path, error)
            return None
