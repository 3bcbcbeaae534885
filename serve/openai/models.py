"""`/v1/models`: the one model that is served, and the names it answers to."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.errors import NotFound
from serve.endpoint import json_response

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

ANY_MODEL = "default"  # what clients of this API send when they do not choose
STARTED_S = int(time.time())


def check_model(core: EngineCore, model: str | None) -> str:
    """The name to answer with. Raises `NotFound` for a model that is not served here."""
    serve = core.plan.serve
    if model is None:
        return serve.served_model_name
    known = (serve.served_model_name, core.plan.model.path, core.facts.path, ANY_MODEL)
    if model not in known and not serve.ignore_model_name:
        raise NotFound(_missing(core, model), param="model")
    return model


def _missing(core: EngineCore, model: str) -> str:
    return f"The model '{model[:200]}' does not exist; this server has '{core.plan.serve.served_model_name}'."


async def list_models(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """The model that is served, to Anthropic's clients as they know it."""
    card = _card(core)
    if _is_anthropics(http):
        page = {"first_id": card["id"], "last_id": card["id"], "has_more": False}
        return json_response({"data": [_model_info(core)], **page})
    return json_response({"object": "list", "data": [card]})


async def retrieve_model(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """The card of the model by its name, or 404. Without a name, as behind a slash too many, the list."""
    model = http.path_params["model"]
    if not model:
        return await list_models(http, core)
    card = _card(core)
    if model == card["id"]:
        return json_response(_model_info(core) if _is_anthropics(http) else card)
    error = {
        "message": _missing(core, model),
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    return json_response({"error": error}, 404)


def _is_anthropics(http: HttpRequest) -> bool:
    return "anthropic-version" in http.headers


def _model_info(core: EngineCore) -> dict[str, Any]:
    name = core.plan.serve.served_model_name
    made = datetime.fromtimestamp(STARTED_S, UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": made,
        "max_input_tokens": core.plan.model.context_length,
        "max_tokens": core.plan.model.context_length,
        "capabilities": None,
        "lifecycle": "active",
        "line": None,
    }


def _card(core: EngineCore) -> dict[str, Any]:
    plan = core.plan
    return {
        "id": plan.serve.served_model_name,
        "object": "model",
        "created": STARTED_S,
        "owned_by": "penstock",
        "root": plan.serve.served_model_name,
        "parent": None,
        "max_model_len": plan.model.context_length,
    }
