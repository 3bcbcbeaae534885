"""Functions for servers that forward requests to other servers: read a body, and answer with an error."""

from __future__ import annotations

from collections.abc import Callable

import orjson
from starlette.requests import Request
from starlette.responses import Response

MAX_BODY_BYTES = 64 * 1024 * 1024


async def read_body(request: Request, note: Callable[[int], None] = lambda size: None) -> bytes | None:
    """Return the body, or None if it has more than `MAX_BODY_BYTES`. Raises `ClientDisconnect`.

    `note` is called with the size of each part, and may raise an exception to stop reading.
    """
    body = bytearray()
    async for part in request.stream():
        note(len(part))
        body += part
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


def failure(kind: str, status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """Return an error response in OpenAI's format, whose type is `kind`."""
    return Response(error_body(kind, message), status_code=status, media_type="application/json", headers=headers)


def error_body(kind: str, message: str) -> bytes:
    """Return the JSON of an error in OpenAI's format."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": None, "code": None}})


def too_large(kind: str) -> Response:
    """Return the response (413) to a body that is too large."""
    return failure(kind, 413, f"The body has more than {MAX_BODY_BYTES} bytes.")
