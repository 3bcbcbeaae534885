"""The API key: every request must carry it, except health checks, metrics, the chat page and CORS preflights."""

from __future__ import annotations

import hmac

import orjson
from starlette.types import ASGIApp, Receive, Scope, Send

from serve.page import PATHS as PAGE_PATHS

OPEN_PREFIXES = ("/health", "/metrics")
OPEN_PATHS = frozenset({"/ready", *PAGE_PATHS})
_BODY = orjson.dumps({"error": "Unauthorized"})


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
            await _refuse(send)

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


async def _refuse(send: Send) -> None:
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(_BODY)),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": _BODY})
