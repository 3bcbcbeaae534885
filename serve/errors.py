"""What a client learns of an error, and the JSON that says so.

OPENAI  {"object": "error", "message", "type", "param", "code"}
NATIVE  {"error": {"message", "type", "param", "code"}} for the sender's mistakes, as OPENAI for ours
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import orjson
from starlette.exceptions import HTTPException
from starlette.responses import Response

from runtime.actors.live_requests import ABORTED, ABORTED_EARLY
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
from runtime.request import Finish

logger = logging.getLogger("penstock.http")

RETRY_CLOSED_S = 5  # a guess at when another server may be there
WORKER_GONE = "A process that computed this request is gone, and the request with it; send it again."

_KINDS = {400: InvalidRequest.kind, 401: Unauthorized.kind, 404: NotFound.kind, 405: "MethodNotAllowedError"}

AnyRequestError = TypeVar("AnyRequestError", bound=RequestError)


class Failure(NamedTuple):
    """An error as a client may see it."""

    status: int
    kind: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] | None = None


def describe(error: Exception) -> Failure:
    """What to tell the client. Messages of foreign exceptions are logged with their traceback and not sent."""
    if isinstance(error, RequestError):
        headers = {413: {"connection": "close"}, 401: {"www-authenticate": "Bearer"}}.get(error.status)
        return Failure(error.status, error.kind, error.message, error.param, headers)
    if isinstance(error, Overloaded):
        retry = {"retry-after": str(error.retry_after_s)}
        return Failure(error.status, error.kind, error.message, headers=retry)
    if isinstance(error, HTTPException):
        kind = _KINDS.get(error.status_code, "InternalServerError")
        return Failure(error.status_code, kind, f"{error.detail}.", headers=error.headers)
    if isinstance(error, EngineClosed):  # on purpose, and for everybody: nothing to log for each
        going = {"retry-after": str(RETRY_CLOSED_S), "connection": "close"}
        return Failure(error.status, error.kind, error.message, headers=going)
    if isinstance(error, EngineFailure):
        logger.error("a request failed: %s", error.message, exc_info=error.__cause__)
        message = WORKER_GONE if isinstance(error, WorkerFailed) else error.message
        return Failure(error.status, error.kind, message)
    logger.error("a request failed unexpectedly", exc_info=error)
    return Failure(EngineFailure.status, EngineFailure.kind, "The server failed to answer this request.")


class Aborted(RequestError):
    """Somebody ended the request. OpenAI's, Anthropic's and Ollama's clients know no such end of an answer."""

    kind = "RequestAborted"


def ended(finish: Finish | None) -> Finish:
    """How an answer ended that is whole. Raises `Aborted` or `EngineFailure` for one that is not."""
    if finish is None or finish in (ABORTED, ABORTED_EARLY):
        raise Aborted("The request was aborted.")
    if finish.kind == "abort":
        raise EngineFailure(finish.message or "The server could not finish this request.")
    return finish


def renamed(error: AnyRequestError, param: str) -> AnyRequestError:
    """The same error about the parameter as the client named it."""
    message = error.message
    if error.param and message.startswith(error.param):
        message = param + message[len(error.param) :]
    return type(error)(message, param=param)


def openai_body(failure: Failure) -> dict[str, Any]:
    """Both shapes that clients of this API read: the fields flat, and again in `error`."""
    fields = _fields(failure)
    return {**fields, "error": fields}


def native_body(failure: Failure) -> dict[str, Any]:
    if failure.status == Unauthorized.status:
        return {"error": failure.message}  # as clients of the native API expect it
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
    """How one route reports errors. `names` maps the engine's parameter names to the route's.

    `stream_event` writes what ends a stream that has begun; without it that is `{"error": {...}}`.
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
        """What a stream that has begun ends with, as bytes."""
        failure = self.failure(error)
        if self.stream_event is not None:
            return self.stream_event(failure)
        from sse_starlette.event import ServerSentEvent  # imports uvicorn: not before a server has

        event = {"error": self.body(failure)["error"]}
        return ServerSentEvent(orjson.dumps(event).decode(), sep="\n").encode()


NATIVE = ErrorFormat(native_body)
OPENAI = ErrorFormat(openai_body)


def refusal_response(path: str, error: RequestError) -> Response:
    """For a client that may not call this path: under /v1 as OpenAI says it, elsewhere as the native API does."""
    return (OPENAI if path.startswith("/v1/") else NATIVE).response(error)
