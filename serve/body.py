"""Reading a request's body: limited, JSON, an object; nothing else happens when it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import anyio.to_thread
import orjson
from starlette.requests import Request as HttpRequest

from runtime.errors import InvalidRequest, PayloadTooLarge

MAX_BODY_BYTES = 10_000_000
INLINE_BYTES = 4096  # takes the loop 3 ms at worst (many objects in a batch); more goes to a thread

T = TypeVar("T")


async def read_body(request: HttpRequest, read: Callable[[bytes], T], *, limit: int) -> T:
    """`read(body)`, in a thread when the body is large. Raises what `read` raises, and `PayloadTooLarge`."""
    body = await read_bytes(request, limit=limit)
    if len(body) > INLINE_BYTES:
        return await anyio.to_thread.run_sync(read, body)
    return read(body)


async def read_bytes(request: HttpRequest, *, limit: int) -> bytes:
    """The body. Raises `PayloadTooLarge` as soon as more than `limit` bytes are announced or have come."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        raise PayloadTooLarge(f"The body has {announced} bytes; at most {limit} are taken.")
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > limit:
            raise PayloadTooLarge(f"The body has more than {limit} bytes.")
        parts.append(part)
    return b"".join(parts)


def parse_object(body: bytes) -> dict[str, Any]:
    """Raises `InvalidRequest` when `body` is not one JSON object in UTF-8."""
    if not body:
        raise InvalidRequest("The body is empty; a JSON object is expected.")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidRequest(f"The body is not valid JSON: the trouble is at {where}.") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return value


def require_json(request: HttpRequest) -> None:
    """Raises `InvalidRequest` unless the body is declared as JSON."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise InvalidRequest("Unsupported Media Type: Only 'application/json' is allowed.")
