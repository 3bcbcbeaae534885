"""The web application: the table of routes, and the middleware around them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from runtime.errors import ConfigurationError, RequestError
from serve import openapi, unsupported
from serve.access import Access, OpenCalls, RouteScope
from serve.anthropic import messages
from serve.endpoint import Endpoint, Handler, max_body_bytes
from serve.errors import NATIVE, OPENAI, ErrorFormat, refusal_response
from serve.native import (
    admin,
    classify,
    encode,
    generate,
    live,
    parsing,
    profile,
    ranking,
    tokens,
    vertex,
)
from serve.ollama import handlers as ollama
from serve.ollama import models as ollama_models
from serve.openai import batches, chat, completions, embeddings, files, models
from serve.openai.file_store import FileStore
from serve.openai.responses import handlers as responses
from serve.openai.responses.store import ResponseStore
from serve.page import page_routes

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

GET, POST = ("GET",), ("POST",)
PUBLIC, USER, ADMIN = RouteScope.PUBLIC, RouteScope.USER, RouteScope.ADMIN


class RouteSpec(NamedTuple):
    """One route. `scope` is who may call it, `error_format` how its errors are reported.

    `takes_ids`: prompts may be token ids, so that its bodies may be larger than texts.
    """

    methods: tuple[str, ...]
    path: str
    handler: Handler
    scope: RouteScope
    error_format: ErrorFormat = NATIVE
    takes_ids: bool = False


ROUTES = (  # searched from the first to the last: what is called most often comes first
    RouteSpec(POST, "/v1/chat/completions", chat.create, USER, chat.ERROR_FORMAT),
    RouteSpec(POST, "/v1/completions", completions.create, USER, completions.ERROR_FORMAT, takes_ids=True),
    RouteSpec(("POST", "PUT"), "/generate", generate.generate, USER, generate.ERROR_FORMAT, takes_ids=True),
    RouteSpec(POST, "/v1/embeddings", embeddings.create, USER, embeddings.ERROR_FORMAT, takes_ids=True),
    RouteSpec(("POST", "PUT"), "/encode", encode.encode, USER, encode.ERROR_FORMAT, takes_ids=True),
    RouteSpec(("POST", "PUT"), "/classify", classify.classify, USER, classify.ERROR_FORMAT, takes_ids=True),
    RouteSpec(("POST", "PUT"), "/v1/rerank", ranking.rerank_list, USER, ranking.RERANK_ERRORS),
    RouteSpec(POST, "/rerank", ranking.rerank, USER, ranking.RERANK_ERRORS),
    RouteSpec(POST, "/v2/rerank", ranking.rerank, USER, ranking.RERANK_ERRORS),
    RouteSpec(POST, "/v1/score", ranking.score, USER, ranking.SCORE_ERRORS, takes_ids=True),
    RouteSpec(POST, "/score", ranking.score, USER, ranking.SCORE_ERRORS, takes_ids=True),
    RouteSpec(POST, "/v1/responses", responses.create, USER, responses.ERROR_FORMAT),
    RouteSpec(POST, "/v1/responses/input_tokens", responses.count_input_tokens, USER, responses.ERROR_FORMAT),
    RouteSpec(GET, "/v1/responses/{response_id}", responses.retrieve, USER, responses.ERROR_FORMAT),
    RouteSpec(("DELETE",), "/v1/responses/{response_id}", responses.delete, USER, responses.ERROR_FORMAT),
    RouteSpec(POST, "/v1/responses/{response_id}/cancel", responses.cancel, USER, responses.ERROR_FORMAT),
    RouteSpec(
        GET,
        "/v1/responses/{response_id}/input_items",
        responses.list_input_items,
        USER,
        responses.ERROR_FORMAT,
    ),
    RouteSpec(POST, "/v1/files", files.upload, USER, OPENAI),
    RouteSpec(GET, "/v1/files", files.list_files, USER, OPENAI),
    RouteSpec(GET, "/v1/files/{file_id}", files.retrieve, USER, OPENAI),
    RouteSpec(GET, "/v1/files/{file_id}/content", files.content, USER, OPENAI),
    RouteSpec(("DELETE",), "/v1/files/{file_id}", files.delete, USER, OPENAI),
    RouteSpec(POST, "/v1/batches", batches.create, USER, OPENAI),
    RouteSpec(GET, "/v1/batches", batches.list_batches, USER, OPENAI),
    RouteSpec(GET, "/v1/batches/{batch_id}", batches.retrieve, USER, OPENAI),
    RouteSpec(POST, "/v1/batches/{batch_id}/cancel", batches.cancel, USER, OPENAI),
    RouteSpec(POST, "/v1/messages", messages.create, USER, messages.ERROR_FORMAT),
    RouteSpec(POST, "/v1/messages/count_tokens", messages.count_tokens, USER, messages.ERROR_FORMAT),
    RouteSpec(POST, "/api/chat", ollama.chat, USER, ollama.ERROR_FORMAT),
    RouteSpec(POST, "/api/generate", ollama.generate, USER, ollama.ERROR_FORMAT),
    RouteSpec(POST, "/api/embed", ollama.embed, USER, ollama.ERROR_FORMAT),
    RouteSpec(POST, "/api/embeddings", ollama.embeddings, USER, ollama.ERROR_FORMAT),
    RouteSpec(GET, "/api/tags", ollama_models.tags, USER, ollama.ERROR_FORMAT),
    RouteSpec(POST, "/api/show", ollama_models.show, USER, ollama.ERROR_FORMAT),
    RouteSpec(GET, "/api/ps", ollama_models.running, USER, ollama.ERROR_FORMAT),
    RouteSpec(GET, "/api/version", ollama_models.version, USER, ollama.ERROR_FORMAT),
    RouteSpec(GET, "/health", admin.health, PUBLIC),
    RouteSpec(GET, "/health_generate", admin.health_generate, USER),
    RouteSpec(GET, "/ready", admin.ready, PUBLIC),
    RouteSpec(GET, "/get_model_info", admin.model_info, USER),
    RouteSpec(GET, "/model_info", admin.model_info, USER),
    RouteSpec(GET, "/get_server_info", admin.server_info, USER),
    RouteSpec(GET, "/server_info", admin.server_info, USER),
    RouteSpec(GET, "/get_load", admin.load, USER),
    RouteSpec(GET, "/load", admin.server_load, USER),
    RouteSpec(GET, "/live_state", live.live_state, USER),
    RouteSpec(GET, "/metrics", admin.metrics, PUBLIC),
    RouteSpec(GET, "/ping", admin.health, PUBLIC),
    RouteSpec(POST, "/invocations", chat.create, USER, chat.ERROR_FORMAT),
    RouteSpec(POST, vertex.PREDICT_ROUTE, vertex.predict, USER, generate.ERROR_FORMAT, takes_ids=True),
    RouteSpec(GET, "/version", admin.version, USER),
    RouteSpec(GET, "/get_weight_version", admin.weight_version, USER),
    RouteSpec(("GET", "POST"), "/flush_cache", admin.flush_cache, ADMIN),
    RouteSpec(("GET", "POST"), "/freeze_gc", admin.freeze_collector, ADMIN),
    RouteSpec(("GET", "POST"), "/start_profile", profile.start, ADMIN),
    RouteSpec(("GET", "POST"), "/stop_profile", profile.stop, ADMIN),
    RouteSpec(POST, "/abort_request", admin.abort_request, USER),
    RouteSpec(POST, "/tokenize", tokens.tokenize, USER),
    RouteSpec(POST, "/v1/tokenize", tokens.tokenize, USER),
    RouteSpec(GET, "/tokenizer_info", tokens.tokenizer_info, USER),
    RouteSpec(POST, "/detokenize", tokens.detokenize, USER, takes_ids=True),
    RouteSpec(POST, "/v1/detokenize", tokens.detokenize, USER, takes_ids=True),
    RouteSpec(GET, "/openapi.json", openapi.openapi, USER),
    RouteSpec(GET, "/docs", openapi.page, USER),
    RouteSpec(POST, "/parse_function_call", parsing.parse_function_call, USER),
    RouteSpec(POST, "/separate_reasoning", parsing.separate_reasoning, USER),
    RouteSpec(("GET", "POST"), "/v1/models", models.list_models, USER, OPENAI),
    RouteSpec(GET, "/v1/models/{model:path}", models.retrieve_model, USER, OPENAI),
    *(
        RouteSpec(methods, path, unsupported.answer, USER)
        for path, (methods, _) in unsupported.GENERATING.items()
    ),
    *(
        RouteSpec(methods, path, unsupported.answer, ADMIN)
        for path, (methods, _) in unsupported.CONTROL.items()
    ),
    *(
        RouteSpec(methods, path, unsupported.answer, USER, ollama.ERROR_FORMAT)
        for path, (methods, _) in unsupported.OLLAMA.items()
    ),
)


def routes_for(environment: Mapping[str, str]) -> tuple[RouteSpec, ...]:
    """`ROUTES`, with Vertex AI's at the paths that its environment names.

    Raises `ConfigurationError` for a path that is none or that another route has.
    """
    predict = environment.get(vertex.PREDICT_VARIABLE) or vertex.PREDICT_ROUTE
    health = environment.get(vertex.HEALTH_VARIABLE) or "/health"
    specs = [spec._replace(path=predict) if spec.path == vertex.PREDICT_ROUTE else spec for spec in ROUTES]
    if health not in ("/health", "/ping"):
        specs.append(RouteSpec(GET, health, admin.health, PUBLIC))
    for variable, path in ((vertex.PREDICT_VARIABLE, predict), (vertex.HEALTH_VARIABLE, health)):
        taken = sum(spec.path == path for spec in specs) > 1
        if taken or not path.startswith("/") or "{" in path:
            trouble = "is the path of another route" if taken else "is no path such as /predict"
            raise ConfigurationError(f"{variable}={path} {trouble}.")
    return tuple(specs)


def build_app(core: EngineCore, environment: Mapping[str, str] = os.environ) -> Starlette:
    """The application that serves `core`: its routes, and the chat page unless it is switched off.

    Raises `ConfigurationError` when the file of keys cannot be used, or for a path that `environment` names.
    """
    plan = core.plan.serve
    access, open_calls = Access.of(plan), OpenCalls(plan.max_open_calls)

    async def refusal(request: HttpRequest, error: Exception) -> Response:
        """What no route answers: unknown paths and methods, which clients without a key need not learn of."""
        try:
            access.admit(request.scope, USER)
        except RequestError as refused:
            return refusal_response(request.url.path, refused)
        return (ollama.ERROR_FORMAT if request.url.path.startswith("/api/") else OPENAI).response(error)

    specs = routes_for(environment)
    routes = [
        Route(
            spec.path,
            Endpoint(
                spec.handler,
                core,
                spec.error_format,
                access,
                spec.scope,
                spec.path,
                max_body_bytes(core.plan, takes_ids=spec.takes_ids),
                open_calls,
            ),
            methods=list(spec.methods),
        )
        for spec in specs
    ]
    app = Starlette(
        routes=[*routes, *(page_routes() if plan.chat_page else [])],
        middleware=_cors(plan.cors_allow_origins),
        exception_handlers={HTTPException: refusal},
    )
    app.state.responses = ResponseStore()
    app.state.files = FileStore(Path(plan.file_storage)) if plan.file_storage is not None else None
    app.state.uploads = files.Uploads()
    app.state.batches = batches.BatchStore()
    app.state.declared = specs
    return app


def _cors(origins: Sequence[str]) -> list[Middleware]:
    """Lets the browser show answers to pages of these origins; without any, to the chat page alone.

    No credentials: where every origin is allowed, a cookie or a client certificate must not be usable.
    """
    if not origins:
        return []
    return [Middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])]
