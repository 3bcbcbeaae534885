"""`/v1/files`: files of batches in one local folder (--file-storage-path)."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from email.message import Message
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import anyio.to_thread
import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse
from starlette.types import ASGIApp

from runtime.errors import InvalidRequest, NotFound, NotSupported, PayloadTooLarge
from serve.access import CLIENT
from serve.endpoint import json_response

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

MAX_FILE_BYTES = 100 * 1024 * 1024
MAX_FILES = 4096
MAX_FOLDER_BYTES = 8 * 1024**3


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
    """Files in a folder, each beside a description of it in JSON. A client sees those of its own key."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def of(cls, core: EngineCore) -> FileStore:
        """Raises `NotSupported` where the server has no folder for files."""
        folder = core.plan.serve.file_storage
        if folder is None:
            raise NotSupported("Files and batches need a folder: start the server with --file-storage-path.")
        return cls(Path(folder))

    def path(self, file_id: str) -> Path:
        """Where the content of a file lies; `file_id` is one of ours."""
        return self.folder / file_id

    def add(self, filename: str, purpose: str, content: bytes, owner: str) -> FileObject:
        """Keep a file. Raises `PayloadTooLarge` where there is no room for it."""
        made = self.new(filename, purpose, owner)
        present = self.all_files()
        room = MAX_FOLDER_BYTES - sum(each.bytes for each in present)
        if len(present) >= MAX_FILES or len(content) > room:
            raise PayloadTooLarge("The server's folder of files is full; delete some.")
        self.path(made.id).write_bytes(content)
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
        """Describe a file whose content has been written."""
        made = replace(made, bytes=self.path(made.id).stat().st_size)
        self.path(f"{made.id}.json").write_bytes(orjson.dumps(asdict(made)))
        return made

    def get(self, file_id: str, owner: str) -> FileObject:
        """Raises `NotFound` for what is not there, or another client's."""
        found = next((each for each in self.all_files() if each.id == file_id and each.owner == owner), None)
        if found is None:
            raise NotFound(f"No file has the id {file_id[:80]}.", param="file_id")
        return found

    def delete(self, file_id: str, owner: str) -> None:
        self.get(file_id, owner)
        self.path(f"{file_id}.json").unlink(missing_ok=True)
        self.path(file_id).unlink(missing_ok=True)

    def all_files(self) -> list[FileObject]:
        """Of every client, oldest first."""
        if not self.folder.is_dir():
            return []
        described = self.folder.glob("file-*.json")
        found = [FileObject(**orjson.loads(each.read_bytes())) for each in described]
        return sorted(found, key=lambda each: (each.created_at, each.id))


async def upload(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Keep a file that comes as multipart/form-data with `purpose` and `file`."""
    store = FileStore.of(core)
    kind = Message()
    kind["content-type"] = http.headers.get("content-type", "")
    boundary = kind.get_param("boundary")
    if kind.get_content_type() != "multipart/form-data" or not isinstance(boundary, str):
        raise InvalidRequest("A file must come as multipart/form-data.", param="file")
    parts: list[bytes] = []
    size = 0
    async for part in http.stream():
        size += len(part)
        if size > MAX_FILE_BYTES:
            raise PayloadTooLarge(f"A file may have at most {MAX_FILE_BYTES} bytes.")
        parts.append(part)
    owner = CLIENT.get().name

    def keep() -> FileObject:
        fields = form_fields(b"".join(parts), boundary.encode("latin-1"))
        if "file" not in fields:
            raise InvalidRequest("The form has no file.", param="file")
        filename, content = fields["file"]
        purpose = fields.get("purpose", ("", b""))[1].decode("utf-8", "replace")
        if purpose != "batch":
            raise InvalidRequest(f"purpose must be batch, not {purpose[:80]!r}.", param="purpose")
        return store.add(filename, purpose, content, owner)

    return json_response((await anyio.to_thread.run_sync(keep)).shown())


def form_fields(body: bytes, boundary: bytes) -> dict[str, tuple[str, bytes]]:
    """Name -> (file's name, content) of the parts of a form. Raises `InvalidRequest` for what is none."""
    found: dict[str, tuple[str, bytes]] = {}
    first, *pieces = (b"\r\n" + body).split(b"\r\n--" + boundary)
    if first.strip() or not pieces or not pieces[-1].startswith(b"--"):
        raise InvalidRequest("The form is not as its boundary says.", param="file")
    for piece in pieces[:-1]:
        head, separator, content = piece.partition(b"\r\n\r\n")
        if not separator:
            raise InvalidRequest("A part of the form has no content.", param="file")
        described = Message()
        for line in head.split(b"\r\n"):
            name, _, value = line.decode("utf-8", "replace").partition(":")
            if name.strip().lower() == "content-disposition":
                described["content-disposition"] = value.strip()
        name = described.get_param("name", header="content-disposition")
        if isinstance(name, str):
            found[name] = (described.get_filename() or "", content)
    return found


async def list_files(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """The client's files, newest first."""
    found = await anyio.to_thread.run_sync(FileStore.of(core).all_files)
    owner = CLIENT.get().name
    shown = [each.shown() for each in reversed(found) if each.owner == owner]
    first, last = (shown[0]["id"], shown[-1]["id"]) if shown else (None, None)
    return json_response(
        {"object": "list", "data": shown, "first_id": first, "last_id": last, "has_more": False}
    )


async def retrieve(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """One file's description."""
    return json_response((await _file(http, core)).shown())


async def content(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """What a file holds."""
    found = await _file(http, core)
    return FileResponse(FileStore.of(core).path(found.id), media_type="application/octet-stream")


async def delete(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Delete a file."""
    file_id, owner = http.path_params["file_id"], CLIENT.get().name
    await anyio.to_thread.run_sync(FileStore.of(core).delete, file_id, owner)
    return json_response({"id": file_id, "object": "file", "deleted": True})


async def _file(http: HttpRequest, core: EngineCore) -> FileObject:
    owner = CLIENT.get().name
    return await anyio.to_thread.run_sync(FileStore.of(core).get, http.path_params["file_id"], owner)
