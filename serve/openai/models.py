"""/v1/models: the one model that is served."""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from serve.core import EngineCore
from serve.replies import json_response


class ModelsDoor:
    """Lists the model and describes it."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._created_s = int(time.time())

    async def list(self, http: HttpRequest) -> ASGIApp:
        return json_response({"object": "list", "data": [self._card()]})

    async def one(self, http: HttpRequest) -> ASGIApp:
        """The card of the model by its name, or 404."""
        model = http.path_params["model"]
        card = self._card()
        if model == card["id"]:
            return json_response(card)
        error = {
            "message": f"The model '{model[:200]}' does not exist",
            "type": "invalid_request_error",
            "param": "model",
            "code": "model_not_found",
        }
        return json_response({"error": error}, 404)

    def _card(self) -> dict[str, Any]:
        plan = self._core.plan
        return {
            "id": plan.serve.served_model_name,
            "object": "model",
            "created": self._created_s,
            "owned_by": "penstock",
            "root": plan.serve.served_model_name,
            "parent": None,
            "max_model_len": plan.model.context_length,
        }
