"""The deployment that receives HTTP requests and sends each to a replica."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# Ray is an optional dependency.

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from serve.http.access import RouteScope
from serve.http.forwarding import error_body, failure, read_body, too_large
from serve.on_ray.prompt_key import prompt_key
from serve.server.app import ROUTES

KIND = "ReplicaError"
ATTEMPTS = 3  # replicas to which a request is sent, if each ends before its answer begins
SCOPE_FIELDS = ("type", "http_version", "method", "scheme", "query_string", "headers", "client", "server")
ADMIN_PATHS = frozenset(spec.path for spec in ROUTES if spec.scope is RouteScope.ADMIN)
# A proxy header. With it, replicas do not treat forwarded requests as local requests of their own machine.
VIA = (b"via", b"1.1 penstock-ray")
LOST = "The replica that computed this answer has ended."

logger = logging.getLogger("penstock.server")


class Ingress:
    """Forwards requests to replicas, and streams the answers back."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(stream=True, method_name="answer")

    async def __call__(self, request: Request) -> Response:
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "")) or "/"
        if path in ADMIN_PATHS:
            return failure(KIND, 501, f"{path} would reach only one of the replicas; update the deployment instead.")
        try:
            body = await read_body(request)
        except ClientDisconnect:
            return Response(status_code=499)
        if body is None:
            return too_large(KIND)
        scope = {name: request.scope[name] for name in SCOPE_FIELDS} | {"path": path, "raw_path": path.encode()}
        scope["headers"] = [*scope["headers"], VIA]
        key = prompt_key(body, dict(request.scope["headers"]))
        for attempt in range(ATTEMPTS):
            parts: Any = self._replicas.remote(key, scope, body)
            try:
                status, headers = await anext(parts)
            except (BackPressureError, DeploymentUnavailableError):
                return failure(KIND, 503, "All replicas are busy; retry later.", {"retry-after": "1"})
            except (RayActorError, StopAsyncIteration):
                logger.warning("A replica ended before its answer began; the request goes to another one.")
                if attempt + 1 < ATTEMPTS:
                    continue
                return failure(KIND, 503, LOST, {"retry-after": "1"})
            response = StreamingResponse(_forward(parts, dict(headers)), status_code=status)
            response.raw_headers = [field for field in headers if field[0] != b"x-request-id"]  # Ray Serve adds it
            return response
        raise AssertionError("unreachable")


async def _forward(parts: Any, headers: dict[bytes, bytes]) -> AsyncIterator[bytes]:
    """Yield the parts of the body.

    If the replica ends, a stream of events ends with an error event. Any other body is cut off; the client can tell
    this from its length.
    """
    try:
        async for part in parts:
            yield part
    except (RayActorError, RayTaskError):
        logger.warning("A replica ended during an answer.")
        if not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            raise
        yield b"data: " + error_body(KIND, LOST) + b"\n\n"
    finally:
        parts.cancel()  # does nothing after the end of the answer
