"""The web application: every route, and what stands around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.routing import Route
from starlette.types import ASGIApp

from serve.admin import AdminDoor
from serve.auth import ApiKey
from serve.body import MAX_BODY_BYTES
from serve.core import EngineCore
from serve.errors import Dialect, Door, answer_http_exception, native_body, openai_body
from serve.native import generate
from serve.native.tokens import TokensDoor
from serve.openai import chat, completions
from serve.openai.models import ModelsDoor
from serve.page import page_routes

NATIVE = Dialect(native_body)
OPENAI = Dialect(openai_body)


def build_app(core: EngineCore, *, lifespan: Any = None, max_body_bytes: int = MAX_BODY_BYTES) -> Starlette:
    """The application that serves `core`. `lifespan` is starlette's: what runs before and after serving."""
    api_key = core.plan.serve.api_key
    middleware = [
        # No credentials: with every origin allowed, a cookie or a client certificate must not be usable.
        Middleware(CORSMiddleware, allow_origins=["*"], allow_methods=["*"], allow_headers=["*"]),
        *([Middleware(ApiKey, api_key=api_key)] if api_key else []),
    ]
    return Starlette(
        routes=[  # looked through from the first to the last: what is asked for most comes first
            *_generating_routes(core, max_body_bytes),
            *_native_routes(core, max_body_bytes),
            *_openai_routes(core),
            *(page_routes() if core.plan.serve.chat_page else []),
        ],
        middleware=middleware,
        exception_handlers={HTTPException: answer_http_exception},
        lifespan=lifespan,
    )


def _generating_routes(core: EngineCore, max_body_bytes: int) -> list[Route]:
    chatting = chat.ChatDoor(core, max_body_bytes=max_body_bytes)
    completing = completions.CompletionsDoor(core, max_body_bytes=max_body_bytes)
    generating = generate.GenerateDoor(core, max_body_bytes=max_body_bytes)
    return [
        _route("/v1/chat/completions", chatting.complete, ["POST"], chat.DIALECT),
        _route("/v1/completions", completing.complete, ["POST"], completions.DIALECT),
        _route("/generate", generating.generate, ["POST", "PUT"], generate.DIALECT),
    ]


def _native_routes(core: EngineCore, max_body_bytes: int) -> list[Route]:
    admin = AdminDoor(core, max_body_bytes=max_body_bytes)
    tokens = TokensDoor(core, max_body_bytes=max_body_bytes)
    return [
        _route("/health", admin.health, ["GET"]),
        _route("/health_generate", admin.health_generate, ["GET"]),
        _route("/ready", admin.health, ["GET"]),
        *_routes(("/get_model_info", "/model_info"), admin.model_info, ["GET"]),
        *_routes(("/get_server_info", "/server_info"), admin.server_info, ["GET"]),
        _route("/get_load", admin.load, ["GET"]),
        _route("/flush_cache", admin.flush_cache, ["GET", "POST"]),
        _route("/abort_request", admin.abort, ["POST"]),
        *_routes(("/tokenize", "/v1/tokenize"), tokens.tokenize, ["POST"]),
        *_routes(("/detokenize", "/v1/detokenize"), tokens.detokenize, ["POST"]),
    ]


def _openai_routes(core: EngineCore) -> list[Route]:
    models = ModelsDoor(core)
    return [
        _route("/v1/models", models.list, ["GET", "POST"], OPENAI),
        _route("/v1/models/{model:path}", models.one, ["GET"], OPENAI),
    ]


def _route(
    path: str,
    handler: Callable[[HttpRequest], Awaitable[ASGIApp]],
    methods: Sequence[str],
    dialect: Dialect = NATIVE,
) -> Route:
    return Route(path, Door(handler, dialect), methods=list(methods))


def _routes(
    paths: Sequence[str],
    handler: Callable[[HttpRequest], Awaitable[ASGIApp]],
    methods: Sequence[str],
    dialect: Dialect = NATIVE,
) -> list[Route]:
    return [_route(path, handler, methods, dialect) for path in paths]
