"""The API key: every request must carry it, except health checks, metrics, the chat page and CORS preflights."""

from __future__ import annotations

import hmac

import orjson
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.errors import Unauthorized
from serve.errors import Failure, openai_body
from serve.page import PATHS as PAGE_PATHS

OPEN_PREFIXES = ("/health", "/metrics")
OPEN_PATHS = frozenset({"/ready", *PAGE_PATHS})


class ApiKey:
    """ASGI middleware. Keys are compared in constant time."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or _is_open(scope) or self._has_key(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _unauthorized(scope["path"])(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        given = b""
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, rest = value.partition(b" ")
                given = rest.strip() if scheme.lower() == b"bearer" else b""
                break
        return hmac.compare_digest(given, self._key)


def _is_open(scope: Scope) -> bool:
    path: str = scope["path"]
    return scope.get("method") == "OPTIONS" or path in OPEN_PATHS or path.startswith(OPEN_PREFIXES)


def _unauthorized(path: str) -> Response:
    """401. Under /v1 in the format of OpenAI's errors, elsewhere as clients of the native API expect it."""
    body = {"error": "Unauthorized"}
    if path.startswith("/v1/"):
        body = openai_body(Failure(Unauthorized.status, Unauthorized.kind, "Unauthorized"))
    headers = {"www-authenticate": "Bearer"}
    return Response(orjson.dumps(body), Unauthorized.status, headers, media_type="application/json")
