"""Errors of a server that forwards requests to other servers, in the format of the request's API."""

from __future__ import annotations

import re

import orjson
from starlette.responses import Response

from serve.anthropic.errors import ERROR_FORMAT as ANTHROPIC
from serve.http.errors import Failure
from serve.http.forwarding import error_body
from serve.ollama.errors import ERROR_FORMAT as OLLAMA

STREAMS = ("text/event-stream", "application/x-ndjson")  # content types of streams that can end with an error

_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')


def error_response(path: str, failure: Failure) -> Response:
    """Return the error response to a request for `path`, in the format of the path's API."""
    return Response(
        _body(path, failure), status_code=failure.status, media_type="application/json", headers=failure.headers
    )


def error_end(path: str, failure: Failure, before: bytes = b"") -> bytes:
    """Return the bytes that end a started stream with an error. The stream must so far consist of whole lines.

    `before` has the last lines of the stream. In `/v1/responses`, the error event gets the number that follows the last
    event in these lines.
    """
    if path.startswith("/api/"):
        return _body(path, failure) + b"\n"
    event = _body(path, failure)
    name = b""
    if path.startswith("/v1/messages"):
        name = b"event: error\n"
    elif path.startswith("/v1/responses"):
        name, numbers = b"event: error\n", _NUMBER.findall(before)
        fields = {"code": "server_error", "message": failure.message, "param": None}
        event = orjson.dumps({"type": "error", "sequence_number": int(numbers[-1]) + 1 if numbers else 0, **fields})
    return b"\n\n" + name + b"data: " + event + b"\n\n"  # the empty line ends the last event


def _body(path: str, failure: Failure) -> bytes:
    if path.startswith("/v1/messages"):
        return orjson.dumps(ANTHROPIC.body(failure))
    if path.startswith("/api/"):
        return orjson.dumps(OLLAMA.body(failure))
    return error_body(failure.kind, failure.message)
