"""`/metrics`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from runtime.actors.scrape import exposition

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


async def metrics(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """The metrics in Prometheus's text format. 404 where they are off."""
    return Response(exposition(core), headers={"content-type": CONTENT_TYPE})
