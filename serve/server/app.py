"""The web application: the table of all routes, and the middleware."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from runtime.errors import ConfigurationError, RequestError
from serve.anthropic import messages
from serve.calls.body import max_body_bytes
from serve.http.access import Access, OpenCalls, RouteScope
from serve.http.endpoint import MAX_LARGE_BYTES, Endpoint, LargeBodies, RouteSpec
from serve.http.errors import OPENAI, refusal_response
from serve.native import (
    adapters,
    admin,
    corpora,
    encode,
    generate,
    live,
    occupation,
    parsing,
    scores,
    sessions,
    storage,
    tokens,
    vertex,
    vllm_control,
    weights,
)
from serve.ollama import handlers as ollama
from serve.ollama import models as ollama_models
from serve.openai import audio, batches, chat, completions, embeddings, files, models
from serve.openai.file_store import FileStore
from serve.openai.responses import handlers as responses
from serve.openai.responses.store import ResponseStore
from serve.page import page_routes
from serve.server import openapi, unsupported

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

GET, POST = ("GET",), ("POST",)
PUBLIC, USER, ADMIN = RouteScope.PUBLIC, RouteScope.USER, RouteScope.ADMIN


ROUTES = (  # searched in order, so the most frequent routes come first
    RouteSpec(POST, "/v1/chat/completions", chat.create, USER, chat.ERROR_FORMAT),
    RouteSpec(POST, "/v1/completions", completions.create, USER, completions.ERROR_FORMAT, takes_ids=True),
    RouteSpec(("POST", "PUT"), "/generate", generate.generate, USER, generate.ERROR_FORMAT, takes_ids=True),
    RouteSpec(POST, "/v1/embeddings", embeddings.create, USER, embeddings.ERROR_FORMAT, takes_ids=True),
    RouteSpec(("POST", "PUT"), "/encode", encode.encode, USER, takes_ids=True),
    RouteSpec(("POST", "PUT"), "/classify", scores.classify, USER, takes_ids=True),
    RouteSpec(POST, "/v1/classify", scores.classify_list, USER, scores.CLASSIFY_ERRORS, takes_ids=True),
    RouteSpec(("POST", "PUT"), "/v1/rerank", scores.rerank_list, USER, scores.RERANK_ERRORS),
    RouteSpec(POST, "/rerank", scores.rerank, USER, scores.RERANK_ERRORS),
    RouteSpec(POST, "/v2/rerank", scores.rerank, USER, scores.RERANK_ERRORS),
    RouteSpec(POST, "/v1/score", scores.score, USER, scores.SCORE_ERRORS, takes_ids=True),
    RouteSpec(POST, "/score", scores.score, USER, scores.SCORE_ERRORS, takes_ids=True),
    RouteSpec(POST, "/v1/responses", responses.create, USER, responses.ERROR_FORMAT),
    RouteSpec(POST, "/v1/responses/input_tokens", responses.count_input_tokens, USER, responses.ERROR_FORMAT),
    *(RouteSpec(methods, path, unsupported.answer, USER) for path, (methods, _) in unsupported.GENERATING.items()),
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
    RouteSpec(POST, "/v1/audio/transcriptions", audio.transcribe, USER, OPENAI),
    RouteSpec(POST, "/v1/audio/translations", audio.translate, USER, OPENAI),
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
    RouteSpec(GET, "/v1/loads", live.loads, USER),
    RouteSpec(GET, "/live_state", live.live_state, USER),
    RouteSpec(GET, "/metrics", admin.metrics, PUBLIC),
    RouteSpec(GET, "/ping", admin.health, PUBLIC),
    RouteSpec(POST, "/invocations", chat.create, USER, chat.ERROR_FORMAT),
    RouteSpec(POST, vertex.PREDICT_ROUTE, vertex.predict, USER, generate.ERROR_FORMAT, takes_ids=True),
    RouteSpec(GET, "/version", admin.version, USER),
    RouteSpec(GET, "/get_weight_version", admin.weight_version, USER),
    RouteSpec(("GET", "POST"), "/flush_cache", admin.flush_cache, ADMIN),
    RouteSpec(POST, "/reset_prefix_cache", vllm_control.reset_prefix_cache, ADMIN, OPENAI),
    RouteSpec(("GET", "POST"), "/clear_hicache_storage_backend", storage.clear_storage, ADMIN),
    RouteSpec(GET, "/hicache/storage-backend", storage.show, ADMIN),
    RouteSpec(("PUT",), "/hicache/storage-backend", storage.attach, ADMIN),
    RouteSpec(("DELETE",), "/hicache/storage-backend", storage.detach, ADMIN),
    RouteSpec(POST, "/hicache/storage-backend/clear", storage.clear_storage, ADMIN),
    RouteSpec(("GET", "POST"), "/freeze_gc", admin.freeze_collector, ADMIN),
    RouteSpec(("GET", "POST"), "/start_expert_distribution_record", admin.start_expert_record, ADMIN),
    RouteSpec(("GET", "POST"), "/stop_expert_distribution_record", admin.stop_expert_record, ADMIN),
    RouteSpec(("GET", "POST"), "/dump_expert_distribution_record", admin.dump_expert_record, ADMIN),
    RouteSpec(("GET", "POST"), "/start_profile", admin.start_profile, ADMIN),
    RouteSpec(("GET", "POST"), "/stop_profile", admin.stop_profile, ADMIN),
    RouteSpec(POST, "/update_weights_from_disk", weights.update_from_disk, ADMIN, weights.ERROR_FORMAT),
    RouteSpec(POST, "/init_weights_update_group", weights.init_group, ADMIN, weights.ERROR_FORMAT),
    RouteSpec(POST, "/destroy_weights_update_group", weights.destroy_group, ADMIN, weights.ERROR_FORMAT),
    RouteSpec(
        POST, "/init_weights_send_group_for_remote_instance", weights.init_send_group, ADMIN, weights.ERROR_FORMAT
    ),
    RouteSpec(POST, "/send_weights_to_remote_instance", weights.send, ADMIN, weights.ERROR_FORMAT),
    RouteSpec(POST, "/update_weights_from_distributed", weights.update_from_group, ADMIN, weights.ERROR_FORMAT),
    RouteSpec(
        POST, "/update_weights_from_tensor", weights.update_from_tensor, ADMIN, weights.ERROR_FORMAT, takes_tensors=True
    ),
    RouteSpec(POST, "/update_weight_version", weights.update_version, ADMIN, weights.ERROR_FORMAT),
    RouteSpec(("GET", "POST"), "/get_weights_by_name", weights.read, ADMIN),
    RouteSpec(("GET", "POST"), "/weights_checker", weights.check, ADMIN, weights.ERROR_FORMAT),
    RouteSpec(("GET", "POST"), "/release_memory_occupation", occupation.release_memory, ADMIN),
    RouteSpec(("GET", "POST"), "/resume_memory_occupation", occupation.resume_memory, ADMIN),
    RouteSpec(POST, "/pause_generation", occupation.pause_generation, ADMIN),
    RouteSpec(POST, "/continue_generation", occupation.continue_generation, ADMIN),
    RouteSpec(POST, "/configure_logging", admin.configure_logging, ADMIN),
    RouteSpec(("GET", "POST"), "/slow_down", occupation.slow_down, ADMIN),
    RouteSpec(GET, "/get_world_size", vllm_control.world_size, USER),
    RouteSpec(POST, "/init_weight_transfer_engine", vllm_control.init_engine, ADMIN, OPENAI),
    RouteSpec(POST, "/start_weight_update", vllm_control.start_update, ADMIN, OPENAI),
    RouteSpec(POST, "/update_weights", vllm_control.update, ADMIN, OPENAI),
    RouteSpec(POST, "/finish_weight_update", vllm_control.finish_update, ADMIN, OPENAI),
    RouteSpec(GET, "/weight_info", vllm_control.weight_info, USER, OPENAI),
    RouteSpec(POST, "/weight_checker", vllm_control.checker, ADMIN, OPENAI),
    RouteSpec(POST, "/pause", vllm_control.pause_requests, ADMIN, OPENAI),
    RouteSpec(POST, "/resume", vllm_control.resume_requests, ADMIN, OPENAI),
    RouteSpec(GET, "/is_paused", vllm_control.is_paused, USER, OPENAI),
    RouteSpec(POST, "/sleep", vllm_control.sleep, ADMIN, OPENAI),
    RouteSpec(POST, "/wake_up", vllm_control.wake_up, ADMIN, OPENAI),
    RouteSpec(GET, "/is_sleeping", vllm_control.is_sleeping, USER, OPENAI),
    RouteSpec(POST, "/add_external_corpus", corpora.add, ADMIN, corpora.ERROR_FORMAT, takes_ids=True),
    RouteSpec(POST, "/remove_external_corpus", corpora.remove, ADMIN, corpora.ERROR_FORMAT),
    RouteSpec(GET, "/list_external_corpora", corpora.list_all, ADMIN, corpora.ERROR_FORMAT),
    RouteSpec(POST, "/load_lora_adapter", adapters.load, ADMIN),
    RouteSpec(POST, "/load_lora_adapter_from_tensors", adapters.load_tensors, ADMIN, takes_tensors=True),
    RouteSpec(POST, "/unload_lora_adapter", adapters.unload, ADMIN),
    RouteSpec(POST, "/v1/load_lora_adapter", adapters.load_in_place, ADMIN, OPENAI),
    RouteSpec(POST, "/v1/unload_lora_adapter", adapters.unload_named, ADMIN, OPENAI),
    RouteSpec(POST, "/abort_request", admin.abort_request, USER),
    RouteSpec(("GET", "POST"), "/open_session", sessions.open_session, USER),
    RouteSpec(("GET", "POST"), "/close_session", sessions.close_session, USER),
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
    *(RouteSpec(methods, path, unsupported.answer, ADMIN) for path, (methods, _) in unsupported.CONTROL.items()),
    *(
        RouteSpec(methods, path, unsupported.answer, USER, ollama.ERROR_FORMAT)
        for path, (methods, _) in unsupported.OLLAMA.items()
    ),
)


def routes_for(environment: Mapping[str, str]) -> tuple[RouteSpec, ...]:
    """Return `ROUTES`, with Vertex AI's routes at the paths in its environment variables.

    Raises `ConfigurationError` if a path is invalid or belongs to another route.
    """
    predict = environment.get(vertex.PREDICT_VARIABLE) or vertex.PREDICT_ROUTE
    health = environment.get(vertex.HEALTH_VARIABLE) or "/health"
    specs = [spec._replace(path=predict) if spec.path == vertex.PREDICT_ROUTE else spec for spec in ROUTES]
    if health not in ("/health", "/ping"):
        specs.append(RouteSpec(GET, health, admin.health, PUBLIC))
    for variable, path in ((vertex.PREDICT_VARIABLE, predict), (vertex.HEALTH_VARIABLE, health)):
        is_taken = sum(spec.path == path for spec in specs) > 1
        if is_taken or not path.startswith("/") or "{" in path:
            problem = "is the path of another route" if is_taken else "is not a path, for example /predict"
            raise ConfigurationError(f"{variable}={path} {problem}.")
    return tuple(specs)


def build_app(core: EngineCore, environment: Mapping[str, str] = os.environ) -> Starlette:
    """Return the application that serves `core`: its routes, and the chat page unless it is disabled.

    Raises `ConfigurationError` if the key file or a path in `environment` is invalid.
    """
    plan = core.plan.serve
    access, open_calls = Access.of(plan), OpenCalls(plan.max_open_calls)
    large_bodies = LargeBodies(max(MAX_LARGE_BYTES, plan.max_body_bytes or 0))

    async def refusal(request: HttpRequest, error: Exception) -> Response:
        """Answer a request for an unknown path or method. Clients without a key are refused as on known paths."""
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
                max_body_bytes(core.plan, takes_ids=spec.takes_ids, takes_tensors=spec.takes_tensors),
                open_calls,
                large_bodies,
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
    """Return the middleware with which browsers let pages of these origins read answers (CORS).

    Without origins, only the server's own pages can read answers. Credentials (cookies, client certificates) are not
    allowed, even if every origin is.
    """
    if not origins:
        return []
    return [Middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["*"], allow_headers=["*"])]
