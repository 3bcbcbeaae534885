"""`/v1/models`: the served model and its LoRA adapters."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from serve.calls.served_model import STARTED_S, missing
from serve.http.endpoint import json_response

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


async def list_models(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the served model and its adapters. Anthropic's clients get Anthropic's format."""
    cards = _cards(core)
    if _is_anthropic_client(http):
        page = {"first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False}
        return json_response({"data": [_model_info(core, card["id"]) for card in cards], **page})
    return json_response({"object": "list", "data": cards})


async def retrieve_model(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the description of the named model, or 404 for an unknown name.

    Without a name (a trailing slash), return the list of models.
    """
    model = http.path_params["model"]
    if not model:
        return await list_models(http, core)
    card = next((card for card in _cards(core) if card["id"] == model), None)
    if card is not None:
        return json_response(_model_info(core, model) if _is_anthropic_client(http) else card)
    error = {
        "message": missing(core, model),
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    return json_response({"error": error}, 404)


def _is_anthropic_client(http: HttpRequest) -> bool:
    return "anthropic-version" in http.headers


def _model_info(core: EngineCore, name: str) -> dict[str, Any]:
    created_at = datetime.fromtimestamp(STARTED_S, UTC).isoformat().replace("+00:00", "Z")
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created_at,
        "max_input_tokens": core.plan.model.context_length,
        "max_tokens": core.plan.model.context_length,
        "capabilities": None,
        "lifecycle": "active",
        "line": None,
    }


def _cards(core: EngineCore) -> list[dict[str, Any]]:
    """Return the description of the base model, followed by those of its adapters."""
    base = core.plan.serve.served_model_name
    models = [(base, base, None), *((each.name, each.path, base) for each in core.adapters.adapters)]
    return [
        {
            "id": name,
            "object": "model",
            "created": STARTED_S,
            "owned_by": "penstock",
            "root": root,
            "parent": parent,
            "max_model_len": core.plan.model.context_length,
        }
        for name, root, parent in models
    ]
