"""`/v1/batches`: answer all requests of a file in the background."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple
from uuid import uuid4

import anyio.to_thread
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.errors import InvalidRequest, NotFound, Overloaded, RequestError, first_error
from serve.calls.batch import FILE_BYTES, BatchCounts, answer_lines, max_line_bytes, read_lines
from serve.calls.client import CLIENT
from serve.calls.decode import Length, NotBuilt
from serve.http.endpoint import decodes, json_response, list_page, read_as
from serve.openai.file_store import FileObject, FileStore
from serve.openai.responses.schema import MAX_METADATA

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

logger = logging.getLogger("penstock.http")

MAX_RUNNING = 16  # maximum number of running batches per client

MAX_REMEMBERED = 1024
MAX_LINES = 50_000
MAX_OUTPUT_BYTES = 1024**3
ROOM_BYTES = 16 * 1024**2  # bytes of answers that a batch may write between two checks of the folder's free space
MAX_KEY = 64  # maximum number of characters per metadata key
MAX_LISTED = 100
MAX_AT_ONCE = 32  # maximum number of running requests per batch, to leave capacity for other clients
WINDOW_S = 24 * 3600
ENDED = ("completed", "failed", "expired", "cancelled")

Endpoint = Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]


@dataclass(slots=True, kw_only=True)
class BatchBody:
    """The body of `/v1/batches`. Unknown fields are refused."""

    closed: ClassVar[bool] = True

    input_file_id: Annotated[str, Length(1, 256)]
    endpoint: Endpoint
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, Annotated[str, Length(0, 512)]], Length(0, MAX_METADATA)] | None = None
    output_expires_after: NotBuilt = None

    def __post_init__(self) -> None:
        """Raise `InvalidRequest` if a key of `metadata` is too long."""
        if any(len(key) > MAX_KEY for key in self.metadata or ()):
            raise InvalidRequest(f"Keys of metadata may have at most {MAX_KEY} characters.", param="metadata")


@dataclass(slots=True, eq=False)
class Batch:
    """One batch. `shown` is the batch as the API's JSON object, without the request counts."""

    owner: str
    shown: dict[str, Any]
    counts: BatchCounts = field(default_factory=BatchCounts)
    task: asyncio.Task[None] | None = None

    def as_json(self) -> dict[str, Any]:
        counts = {
            "total": self.counts.total,
            "completed": self.counts.completed,
            "failed": self.counts.failed,
        }
        return self.shown | {"request_counts": counts}

    def become(self, status: str) -> None:
        """Set the status, and record the current time as `STATUS_at`."""
        self.shown["status"] = status
        self.shown[f"{status}_at"] = int(time.time())


class Limits(NamedTuple):
    """Limits of a batch: the number of requests that run at the same time, and the bytes per line."""

    num_at_once: int
    line_bytes: int


class BatchStore:
    """The batches of this process, oldest first. A restart loses the batches, but not their files."""

    def __init__(self) -> None:
        self._batches: dict[str, Batch] = {}

    def add(self, batch: Batch) -> None:
        """Add a batch, and forget the oldest ended batches if there are too many.

        Raises `Overloaded` if too many batches of its client are running.
        """
        running = [each for each in self._batches.values() if each.shown["status"] not in ENDED]
        if sum(each.owner == batch.owner for each in running) >= MAX_RUNNING:
            raise Overloaded(f"{MAX_RUNNING} of your batches are running.", retry_after_s=30)
        for batch_id in [each for each in self._batches if self._batches[each] not in running]:
            if len(self._batches) < MAX_REMEMBERED:
                break
            del self._batches[batch_id]
        self._batches[batch.shown["id"]] = batch

    def get(self, batch_id: str, owner: str) -> Batch:
        """Return a batch. Raises `NotFound` if it does not exist or belongs to another client."""
        batch = self._batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise NotFound(f"No batch has the id {batch_id[:80]}.", param="batch_id")
        return batch

    def of(self, owner: str) -> list[Batch]:
        """Return a client's batches, newest first."""
        return [each for each in reversed(self._batches.values()) if each.owner == owner]


@decodes(BatchBody)
async def create(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Start a batch that answers the lines of a file."""
    body = await read_as(http, BatchBody)
    files, owner = FileStore.of(http), CLIENT.get().name
    source = await anyio.to_thread.run_sync(files.get, body.input_file_id, owner)
    await anyio.to_thread.run_sync(files.room, owner)
    now = int(time.time())
    states = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    shown = {
        "id": f"batch_{uuid4().hex}",
        "object": "batch",
        "endpoint": body.endpoint,
        "errors": None,
        "input_file_id": source.id,
        "completion_window": body.completion_window,
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": now,
        "expires_at": now + WINDOW_S,
        "metadata": body.metadata,
        **{f"{state}_at": None for state in states},
    }
    batch = Batch(owner, shown)
    http.app.state.batches.add(batch)
    headers = {name: value for name, value in http.headers.items() if name in ("authorization", "x-api-key")}
    takes_ids = any(spec.takes_ids for spec in http.app.state.declared if spec.path == body.endpoint)
    limits = Limits(
        num_at_once=max(1, min(MAX_AT_ONCE, core.plan.scheduler.max_running // 2)),
        line_bytes=max_line_bytes(core.plan, takes_ids=takes_ids),
    )
    batch.task = asyncio.create_task(_run(batch, files, http.app, headers, limits))
    return json_response(batch.as_json())


async def list_batches(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the client's batches, newest first."""
    FileStore.of(http)
    shown = [batch.as_json() for batch in http.app.state.batches.of(CLIENT.get().name)]
    return list_page(http, shown, limit=20, max_limit=MAX_LISTED)


async def retrieve(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the state of a batch, and the ids of the files with its answers."""
    FileStore.of(http)
    batch = http.app.state.batches.get(http.path_params["batch_id"], CLIENT.get().name)
    return json_response(batch.as_json())


async def cancel(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Cancel a batch. The answers so far are kept."""
    FileStore.of(http)
    batch: Batch = http.app.state.batches.get(http.path_params["batch_id"], CLIENT.get().name)
    if batch.shown["status"] in ENDED:
        raise InvalidRequest(f"The batch is already {batch.shown['status']}.", param="batch_id")
    if batch.shown["status"] != "cancelling":
        batch.become("cancelling")
        if batch.task is not None:
            batch.task.cancel()
    return json_response(batch.as_json())


async def _run(batch: Batch, files: FileStore, app: ASGIApp, headers: Mapping[str, str], limits: Limits) -> None:
    """Answer all lines, and set the batch's final status, also after an error or cancellation."""
    state = "failed"
    written: dict[str, FileObject] = {}
    try:
        for name, kind in (("output_file_id", "output"), ("error_file_id", "error")):
            filename = f"{batch.shown['id']}_{kind}.jsonl"
            written[name] = files.new(filename, "batch_output", batch.owner)
        batch.counts.total = await anyio.to_thread.run_sync(_num_lines, files, batch, limits)
        batch.become("in_progress")
        async with asyncio.timeout(WINDOW_S):
            await _answer(batch, files, written, app, headers, limits)
        state = "completed"
    except asyncio.CancelledError:
        state = "cancelled"
    except TimeoutError:
        state = "expired"
    except Exception as error:  # an error, for example a full disk, must not affect other batches
        _fail(batch, error)
    finally:
        try:
            _keep(batch, files, written)
        except Exception as error:
            state = "failed"
            _fail(batch, error)
        batch.become(state)


async def _answer(
    batch: Batch,
    files: FileStore,
    written: Mapping[str, FileObject],
    app: ASGIApp,
    headers: Mapping[str, str],
    limits: Limits,
) -> None:
    import httpx  # only batches need an HTTP client

    output, errors = (files.path(file.id) for file in written.values())
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    url = "http://127.0.0.1"
    async with httpx.AsyncClient(transport=transport, base_url=url, timeout=None, headers=headers) as client:
        with _source(files, batch).open("rb") as source, output.open("wb") as good, errors.open("wb") as bad:
            room = 0

            def write(line: bytes, is_good: bool) -> None:
                nonlocal room
                if room < len(line):
                    room = min(files.room(batch.owner), ROOM_BYTES)
                room -= len(line)
                (good if is_good else bad).write(line)
                if good.tell() + bad.tell() > MAX_OUTPUT_BYTES:
                    raise InvalidRequest(f"The answers have more than {MAX_OUTPUT_BYTES} bytes.")

            await answer_lines(
                client,
                read_lines(source, limits.line_bytes),
                write,
                batch.counts,
                num_at_once=limits.num_at_once,
                max_line_bytes=limits.line_bytes,
                url=batch.shown["endpoint"],
                ahead_bytes=FILE_BYTES,
            )


def _source(files: FileStore, batch: Batch) -> Path:
    return files.path(batch.shown["input_file_id"])


def _num_lines(files: FileStore, batch: Batch, limits: Limits) -> int:
    """Return the number of lines that are not blank. Raises `InvalidRequest` if there are none or too many."""
    with _source(files, batch).open("rb") as source:
        num_lines = sum(bool(line.strip()) for line in read_lines(source, limits.line_bytes))
    if not num_lines:
        raise InvalidRequest("The file has no lines.", param="input_file_id")
    if num_lines > MAX_LINES:
        raise InvalidRequest(f"A batch may have at most {MAX_LINES} lines.", param="input_file_id")
    return num_lines


def _fail(batch: Batch, error: Exception) -> None:
    """Record the error that ended a batch."""
    first = first_error(error)
    code, message = "server_error", "The batch failed."
    if isinstance(first, RequestError):
        code, message = "invalid_request", first.message
    else:
        logger.error("batch %s failed", batch.shown["id"], exc_info=error)
    failure = {"code": code, "message": message, "param": None, "line": None}
    batch.shown["errors"] = {"object": "list", "data": [failure]}


def _keep(batch: Batch, files: FileStore, written: Mapping[str, FileObject]) -> None:
    """Make the files with answers visible in the API, and delete empty files."""
    for name, file in written.items():
        path = files.path(file.id)
        if path.is_file() and path.stat().st_size:
            batch.shown[name] = files.keep(file).id
        else:
            files.discard(file.id)
