"""Error responses: which information about an error a client gets, and in which JSON format.

OPENAI  {"object": "error", "message", "type", "param", "code"}
NATIVE  {"error": {"message", "type", "param", "code"}} for client errors; the OPENAI format for server errors
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from runtime.errors import (
    EngineClosed,
    EngineFailure,
    InvalidRequest,
    NotFound,
    Overloaded,
    RequestError,
    Unauthorized,
    WorkerFailed,
)
from serve.calls.errors import renamed

logger = logging.getLogger("penstock.http")

RETRY_CLOSED_S = 5  # Retry-After during a shutdown: estimated seconds until another server is ready
WORKER_GONE = "A worker process that computed this request has ended; send the request again."

_KINDS = {400: InvalidRequest.kind, 401: Unauthorized.kind, 404: NotFound.kind, 405: "MethodNotAllowedError"}


class Failure(NamedTuple):
    """The parts of an error that a client may see."""

    status: int
    kind: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] | None = None


def describe(error: Exception) -> Failure:
    """Return the information about an error that the client gets.

    An unexpected error is logged with its traceback, and the client gets a general message in place of its text.
    """
    if isinstance(error, RequestError):
        headers = {413: {"connection": "close"}, 401: {"www-authenticate": "Bearer"}}.get(error.status)
        return Failure(error.status, error.kind, error.message, error.param, headers)
    if isinstance(error, Overloaded):
        retry = {"retry-after": str(error.retry_after_s)}
        return Failure(error.status, error.kind, error.message, headers=retry)
    if isinstance(error, HTTPException):
        kind = _KINDS.get(error.status_code, "InternalServerError")
        return Failure(error.status_code, kind, f"{error.detail}.", headers=error.headers)
    if isinstance(error, EngineClosed):  # the server shuts down as planned, so the error is not logged
        closing_headers = {"retry-after": str(RETRY_CLOSED_S), "connection": "close"}
        return Failure(error.status, error.kind, error.message, headers=closing_headers)
    if isinstance(error, EngineFailure):
        logger.error("a request failed: %s", error.message, exc_info=error.__cause__)
        message = WORKER_GONE if isinstance(error, WorkerFailed) else error.message
        return Failure(error.status, error.kind, message)
    logger.error("a request failed unexpectedly", exc_info=error)
    return Failure(EngineFailure.status, EngineFailure.kind, "The server failed to answer this request.")


def openai_body(failure: Failure) -> dict[str, Any]:
    """Return the fields both at the top level and in `error`, because OpenAI clients read one or the other."""
    fields = _fields(failure)
    return {**fields, "error": fields}


def native_body(failure: Failure) -> dict[str, Any]:
    if failure.status == Unauthorized.status:
        return {"error": failure.message}  # clients of the native API expect a plain text
    return openai_body(failure) if failure.status >= 500 else {"error": _fields(failure)}


def _fields(failure: Failure) -> dict[str, Any]:
    return {
        "object": "error",
        "message": failure.message,
        "type": failure.kind,
        "param": failure.param,
        "code": failure.status,
    }


@dataclass(frozen=True, slots=True)
class ErrorFormat:
    """How a route reports errors. `names` maps the engine's parameter names to the route's names.

    `stream_event` returns the event that ends a started stream with an error. If it is None, the event is
    `{"error": {...}}`.
    """

    body: Callable[[Failure], dict[str, Any]]
    names: Mapping[str, str] = field(default_factory=dict)
    stream_event: Callable[[Failure], bytes] | None = None

    def failure(self, error: Exception) -> Failure:
        name = self.names.get(error.param or "") if isinstance(error, RequestError) else None
        if isinstance(error, RequestError) and name is not None:
            error = renamed(error, name)
        return describe(error)

    def response(self, error: Exception) -> Response:
        failure = self.failure(error)
        return Response(
            orjson.dumps(self.body(failure)),
            status_code=failure.status,
            headers=failure.headers,
            media_type="application/json",
        )

    def event(self, error: Exception) -> bytes:
        """Return the event that ends a started stream, as bytes."""
        failure = self.failure(error)
        if self.stream_event is not None:
            return self.stream_event(failure)
        from sse_starlette.event import ServerSentEvent  # imports uvicorn, which only servers need

        event = {"error": self.body(failure)["error"]}
        return ServerSentEvent(orjson.dumps(event).decode(), sep="\n").encode()


NATIVE = ErrorFormat(native_body)
OPENAI = ErrorFormat(openai_body)


def refusal_response(path: str, error: RequestError) -> Response:
    """Return the error response to a client that may not call `path`, in OpenAI's format for /v1, else in SGLang's."""
    return (OPENAI if path.startswith("/v1/") else NATIVE).response(error)
