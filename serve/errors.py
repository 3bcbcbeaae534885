"""What a client gets to know about an error, and in which shape.

Two shapes, as clients of the two families of routes expect them:

    OPENAI  {"object": "error", "message", "type", "param", "code"}
    NATIVE  {"error": {"message", "type", "param", "code"}} for the sender's mistakes, the flat shape for ours
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import orjson
from sse_starlette.event import ServerSentEvent
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.errors import EngineFailure, InvalidRequest, NotFound, Overloaded, RequestError, Unauthorized

logger = logging.getLogger("penstock.http")

CLIENT_GONE = 499  # nobody reads it; for access logs
_KINDS = {400: InvalidRequest.kind, 401: Unauthorized.kind, 404: NotFound.kind, 405: "MethodNotAllowedError"}

AnyRequestError = TypeVar("AnyRequestError", bound=RequestError)


class ClientGoneError(Exception):
    """The client left before its answer was ready."""


class Failure(NamedTuple):
    """An error in words that may leave the house."""

    status: int
    kind: str
    message: str
    param: str | None = None
    headers: Mapping[str, str] | None = None


def describe(error: Exception) -> Failure:
    """What to tell the client. Errors that are not ours are logged with their traceback and told as ours."""
    if isinstance(error, RequestError):
        headers = {"connection": "close"} if error.status == 413 else None
        return Failure(error.status, error.kind, error.message, error.param, headers)
    if isinstance(error, Overloaded):
        retry = {"retry-after": str(error.retry_after_s)}
        return Failure(error.status, error.kind, error.message, headers=retry)
    if isinstance(error, HTTPException):
        kind = _KINDS.get(error.status_code, "InternalServerError")
        return Failure(error.status_code, kind, f"{error.detail}.", headers=error.headers)
    if isinstance(error, EngineFailure):
        logger.error("a request failed: %s", error.message, exc_info=error.__cause__)
        return Failure(error.status, error.kind, error.message)
    logger.error("a request failed unexpectedly", exc_info=error)
    return Failure(EngineFailure.status, EngineFailure.kind, "The server failed to answer this request.")


def renamed(error: AnyRequestError, param: str) -> AnyRequestError:
    """The same error about the parameter as the client named it."""
    message = error.message
    if error.param and message.startswith(error.param):
        message = param + message[len(error.param) :]
    return type(error)(message, param=param)


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one route speaks of errors. `names` turns the engine's parameter names into the route's."""

    body: Callable[[Failure], dict[str, Any]]
    names: Mapping[str, str] = field(default_factory=dict)

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
        """One server-sent event, for a stream that has begun."""
        return ServerSentEvent(orjson.dumps({"error": self.inner(error)}).decode(), sep="\n").encode()

    def inner(self, error: Exception) -> Any:
        body = self.body(self.failure(error))
        return body.get("error", body)


def openai_body(failure: Failure) -> dict[str, Any]:
    return {
        "object": "error",
        "message": failure.message,
        "type": failure.kind,
        "param": failure.param,
        "code": failure.status,
    }


def native_body(failure: Failure) -> dict[str, Any]:
    if failure.status >= 500:
        return openai_body(failure)
    body = openai_body(failure)
    del body["object"]
    return {"error": body}


@dataclass(frozen=True, slots=True)
class Door:
    """One route: its handler, and the border where every error becomes an answer."""

    handler: Callable[[HttpRequest], Awaitable[ASGIApp]]
    dialect: Dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self.handler(HttpRequest(scope, receive))
        except (ClientGoneError, ClientDisconnect):
            response = Response(status_code=CLIENT_GONE)
        except Exception as error:  # the request's border
            response = self.dialect.response(error)
        await response(scope, receive, send)


async def answer_http_exception(request: HttpRequest, error: Exception) -> Response:
    """For what the router refuses: unknown paths and methods."""
    return Dialect(openai_body).response(error)
