"""The web application: the table of routes, and the middleware around them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from serve.auth import ApiKey
from serve.endpoint import Endpoint, Handler
from serve.errors import NATIVE, OPENAI, ErrorFormat, http_exception_response
from serve.native import admin, generate, tokens
from serve.openai import chat, completions, models
from serve.page import page_routes

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

GET, POST = ("GET",), ("POST",)


class RouteSpec(NamedTuple):
    """One route. `error_format` is how its errors are reported."""

    methods: tuple[str, ...]
    path: str
    handler: Handler
    error_format: ErrorFormat = NATIVE


ROUTES = (  # searched from the first to the last: what is called most often comes first
    RouteSpec(POST, "/v1/chat/completions", chat.create, chat.ERROR_FORMAT),
    RouteSpec(POST, "/v1/completions", completions.create, completions.ERROR_FORMAT),
    RouteSpec(("POST", "PUT"), "/generate", generate.generate, generate.ERROR_FORMAT),
    RouteSpec(GET, "/health", admin.health),
    RouteSpec(GET, "/health_generate", admin.health_generate),
    RouteSpec(GET, "/ready", admin.health),
    RouteSpec(GET, "/get_model_info", admin.model_info),
    RouteSpec(GET, "/model_info", admin.model_info),
    RouteSpec(GET, "/get_server_info", admin.server_info),
    RouteSpec(GET, "/server_info", admin.server_info),
    RouteSpec(GET, "/get_load", admin.load),
    RouteSpec(("GET", "POST"), "/flush_cache", admin.flush_cache),
    RouteSpec(POST, "/abort_request", admin.abort_request),
    RouteSpec(POST, "/tokenize", tokens.tokenize),
    RouteSpec(POST, "/v1/tokenize", tokens.tokenize),
    RouteSpec(POST, "/detokenize", tokens.detokenize),
    RouteSpec(POST, "/v1/detokenize", tokens.detokenize),
    RouteSpec(("GET", "POST"), "/v1/models", models.list_models, OPENAI),
    RouteSpec(GET, "/v1/models/{model:path}", models.retrieve_model, OPENAI),
)


def build_app(core: EngineCore) -> Starlette:
    """The application that serves `core`: `ROUTES`, and the chat page unless it is switched off."""
    plan = core.plan.serve
    middleware = [
        # No credentials: with every origin allowed, a cookie or a client certificate must not be usable.
        Middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]),
        *([Middleware(ApiKey, api_key=plan.api_key)] if plan.api_key else []),
    ]
    routes = [
        Route(spec.path, Endpoint(spec.handler, core, spec.error_format), methods=list(spec.methods))
        for spec in ROUTES
    ]
    return Starlette(
        routes=[*routes, *(page_routes() if plan.chat_page else [])],
        middleware=middleware,
        exception_handlers={HTTPException: http_exception_response},
    )
