"""Handlers that open and close sessions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from serve.calls.client import CLIENT
from serve.calls.sessions import CloseSessionBody, OpenSessionBody
from serve.http.endpoint import decodes, json_response, read_as

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


@decodes(OpenSessionBody)
async def open_session(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Open a session, and return its id. Only the client that opened a session can use it."""
    body = await read_as(http, OpenSessionBody)
    return json_response(core.sessions.open(body.capacity_of_str_len, body.session_id, CLIENT.get().name))


@decodes(CloseSessionBody)
async def close_session(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Close a session and delete its tokens. Its running requests continue."""
    body = await read_as(http, CloseSessionBody)
    core.sessions.close(body.session_id, CLIENT.get().name)
    return Response(status_code=200)
