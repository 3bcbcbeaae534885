"""`/v1/files`: upload, list, read and delete the files of batches (--file-storage-path)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio.to_thread
from starlette.requests import Request as HttpRequest
from starlette.responses import FileResponse
from starlette.types import ASGIApp

from runtime.errors import InvalidRequest, NotFound, Overloaded, PayloadTooLarge
from serve.calls.client import CLIENT
from serve.http.endpoint import json_response, list_page
from serve.openai.file_store import FileObject, FileStore

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

MAX_FILE_BYTES = 100 * 1024 * 1024
# Limit on the bytes of all running uploads. An upload stays in memory until it is complete.
MAX_ARRIVING_BYTES = 256 * 1024 * 1024
MAX_LISTED = 10_000
MAX_CONTENT_TYPE = 1024  # maximum number of characters

MAX_BOUNDARY = 70  # maximum number of characters, as in RFC 2046
MAX_PARTS = 16
MAX_HEAD_BYTES = 8192  # limit on the headers of each part

# Matches `; name=value` or `; name="value"`, each time at the end of the last match, so that the time is linear.
_PARAMETER = re.compile(r';\s*([\w*-]+)\s*=\s*(?:"((?:[^"\\]|\\.)*+)"|([^\s;"]*))\s*', re.ASCII | re.DOTALL)


class Uploads:
    """Counts and limits the bytes of all running uploads, in total and by client.

    `client` is the name of the API key, or "" without a key. The uploads of one key may use half of the total limit.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._of_client: Counter[str] = Counter()

    @contextmanager
    def one(self, client: str) -> Iterator[bytearray]:
        """Yield the buffer of one upload. Use `grow` to extend it."""
        body = bytearray()
        try:
            yield body
        finally:
            self.num_bytes -= len(body)
            self._of_client[client] -= len(body)
            if not self._of_client[client]:
                del self._of_client[client]

    def grow(self, body: bytearray, part: bytes, client: str) -> None:
        """Append `part` to the buffer `body`.

        Raises `PayloadTooLarge` if this upload is too large, and `Overloaded` if all running uploads, or all uploads
        of this client, are too large together.
        """
        check_size(len(body) + len(part))
        if self.num_bytes + len(part) > MAX_ARRIVING_BYTES:
            raise Overloaded("Too many files are being uploaded; try again.", retry_after_s=5)
        if client and self._of_client[client] + len(part) > MAX_ARRIVING_BYTES // 2:
            raise Overloaded("You are uploading too many files at once; try again.", retry_after_s=5)
        body += part
        self.num_bytes += len(part)
        self._of_client[client] += len(part)


def check_size(num_bytes: int) -> None:
    """Raise `PayloadTooLarge` if a file has too many bytes."""
    if num_bytes > MAX_FILE_BYTES:
        raise PayloadTooLarge(f"A file may have at most {MAX_FILE_BYTES} bytes.")


async def upload(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Store a file that is sent as multipart/form-data with `purpose` and `file`."""
    store = FileStore.of(http)
    boundary = boundary_of(http.headers.get("content-type", ""))
    content_length = http.headers.get("content-length", "")
    check_size(int(content_length[:20]) if content_length.isdecimal() else 0)
    owner = CLIENT.get().name
    uploads: Uploads = http.app.state.uploads
    with uploads.one(owner) as body:
        async for part in http.stream():
            uploads.grow(body, part, owner)
        file = await anyio.to_thread.run_sync(_keep, store, body, boundary, owner)
    return json_response(file.shown())


def _keep(store: FileStore, body: bytearray, boundary: bytes, owner: str) -> FileObject:
    fields = form_fields(body, boundary)
    for name in fields.keys() - {"file", "purpose"}:
        raise InvalidRequest(f"{name[:80]} is not supported here; leave it out.", param=name[:80])
    if "file" not in fields:
        raise InvalidRequest("The form has no file.", param="file")
    purpose = bytes(fields.get("purpose", ("", b""))[1][:80]).decode("utf-8", "replace")
    if purpose != "batch":
        raise InvalidRequest(f"purpose must be batch, not {purpose!r}.", param="purpose")
    filename, content = fields["file"]
    return store.add(filename, purpose, content, owner)


def boundary_of(content_type: str) -> bytes:
    """Return the boundary of a multipart form. Raises `InvalidRequest` for other content types and bad boundaries."""
    media_type, _, _ = content_type[:MAX_CONTENT_TYPE].partition(";")
    if media_type.strip().lower() != "multipart/form-data":
        raise InvalidRequest("A file must be sent as multipart/form-data.", param="file")
    boundary = _parameters(content_type).get("boundary", "")
    if len(content_type) > MAX_CONTENT_TYPE or not 1 <= len(boundary) <= MAX_BOUNDARY:
        raise InvalidRequest(f"The form needs a boundary of 1 to {MAX_BOUNDARY} characters.", param="file")
    return boundary.encode("latin-1")


def form_fields(body: bytes | bytearray, boundary: bytes) -> dict[str, tuple[str, memoryview]]:
    """Map the names of a form's parts to (filename, content). Raises `InvalidRequest` for an invalid form."""
    delimiter = b"\r\n--" + boundary
    fields: dict[str, tuple[str, memoryview]] = {}
    whole = memoryview(body)
    at = len(delimiter) - 2 if body.startswith(delimiter[2:]) else len(body)
    while body.startswith(b"\r\n", at) and len(fields) < MAX_PARTS:
        head_end = body.find(b"\r\n\r\n", at, at + MAX_HEAD_BYTES)
        end = body.find(delimiter, head_end + 4) if head_end >= 0 else -1
        if end < 0:
            raise InvalidRequest("A part of the form has no end, or its head is too long.", param="file")
        parameters = _disposition(bytes(whole[at:head_end]))
        name = parameters.get("name")
        if name is None or name in fields:
            raise InvalidRequest("Each part of the form must have a unique name.", param="file")
        fields[name] = parameters.get("filename", ""), whole[head_end + 4 : end]
        at = end + len(delimiter)
    if not body.startswith(b"--", at):
        raise InvalidRequest("The form does not match its boundary, or has too many parts.", param="file")
    return fields


def _disposition(head: bytes) -> dict[str, str]:
    for line in head.split(b"\r\n"):
        name, _, value = line.decode("utf-8", "replace").partition(":")
        if name.strip().lower() == "content-disposition":
            return _parameters(value)
    return {}


def _parameters(header: str) -> dict[str, str]:
    """Parse the parameters of a header's value, for example `form-data; name="file"`. Stops at an invalid parameter."""
    parameters: dict[str, str] = {}
    at = header.find(";")
    while at >= 0 and (match := _PARAMETER.match(header, at)):
        name, quoted, token = match.groups()
        parameters[name.lower()] = token if quoted is None else re.sub(r'\\(["\\])', r"\1", quoted)
        at = match.end()
    return parameters


async def list_files(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the client's files, newest first unless `order=asc`. The query parameter `purpose` selects files."""
    files = await anyio.to_thread.run_sync(FileStore.of(http).all_files)
    owner, purpose = CLIENT.get().name, http.query_params.get("purpose")
    shown = [
        each.shown() for each in reversed(files) if each.owner == owner and (not purpose or each.purpose == purpose)
    ]
    return list_page(http, shown, limit=MAX_LISTED, max_limit=MAX_LISTED)


async def retrieve(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the description of a file."""
    return json_response((await _file(http, core)).shown())


async def content(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the content of a file."""
    path = FileStore.of(http).path((await _file(http, core)).id)
    try:
        stat = await anyio.to_thread.run_sync(path.stat)
    except FileNotFoundError:  # the file was deleted in the meantime
        raise NotFound("The file has been deleted.", param="file_id") from None
    return FileResponse(path, media_type="application/octet-stream", stat_result=stat)


async def delete(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Delete a file."""
    file_id, owner = http.path_params["file_id"], CLIENT.get().name
    await anyio.to_thread.run_sync(FileStore.of(http).delete, file_id, owner)
    return json_response({"id": file_id, "object": "file", "deleted": True})


async def _file(http: HttpRequest, core: EngineCore) -> FileObject:
    owner = CLIENT.get().name
    return await anyio.to_thread.run_sync(FileStore.of(http).get, http.path_params["file_id"], owner)
