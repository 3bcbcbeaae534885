"""Handlers that describe the served model in Ollama's format."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.errors import InvalidRequest, NotFound
from serve.calls.body import decode_open, parse_object
from serve.calls.media import takes_kind
from serve.calls.served_model import STARTED_S, ServedModel, choose_model
from serve.http.endpoint import decodes, json_response, read_body
from serve.ollama.schema import ShowBody

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

API_VERSION = "0.13.0"  # the Ollama version whose API this server has; clients refuse older versions
LATEST = ":latest"
NEVER = "2318-01-01T00:00:00Z"  # the reported time at which the model is unloaded, which is far in the future
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def chosen_model(core: EngineCore, model: str) -> ServedModel:
    """Return the model of a call, whose name may end with Ollama's `:latest`.

    Raises `NotFound` if the model is not served here.
    """
    try:
        return choose_model(core, model)
    except NotFound:
        if model.endswith(LATEST):
            return choose_model(core, model.removesuffix(LATEST))._replace(name=model)
        raise


async def version(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the version of Ollama whose API this server has."""
    return json_response({"version": API_VERSION})


async def tags(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the list of models: the served model and its adapters."""
    names = [each.name for each in core.adapters.adapters]
    return json_response({"models": [_card(core), *(_card(core, name) for name in names)]})


async def running(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return the list of models in memory: the served model."""
    on_gpu = core.plan.model.device != "cpu"
    card = {
        **_card(core),
        "expires_at": NEVER,
        "size_vram": core.facts.weight_bytes if on_gpu else 0,
        "context_length": core.plan.model.context_length,
    }
    return json_response({"models": [card]})


@decodes(ShowBody)
async def show(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Return a description of the model."""
    return json_response(await read_body(http, partial(_show, core), any_type=True))


def _show(core: EngineCore, raw: bytes) -> dict[str, Any]:
    body = decode_open(ShowBody, parse_object(raw), core, "/api/show")
    model = body.model or body.name
    if model is None:
        raise InvalidRequest("model is required.", param="model")
    chosen_model(core, model)
    facts, kind = core.facts, _family(core)
    template = core.tokenizer.template if core.tokenizer is not None else None
    serve = core.plan.serve
    preferred = {**(facts.preferred_sampling if serve.model_sampling else {}), **serve.preferred_sampling}
    return {
        "modelfile": f"FROM {core.plan.model.path}\n",
        "parameters": "\n".join(f"{name} {value}" for name, value in preferred.items()),
        "template": template.source if template is not None else "",
        "details": _details(core),
        "model_info": {
            "general.architecture": kind,
            "general.parameter_count": _num_parameters(core),
            f"{kind}.context_length": core.plan.model.context_length,
            f"{kind}.embedding_length": facts.hidden_size,
            f"{kind}.block_count": facts.num_layers,
            f"{kind}.attention.head_count": facts.num_heads,
            f"{kind}.attention.head_count_kv": facts.num_kv_heads,
            f"{kind}.vocab_size": facts.vocab_size,
        },
        "capabilities": _capabilities(core),
        "modified_at": _started(),
    }


def _card(core: EngineCore, adapter: str | None = None) -> dict[str, Any]:
    base = core.plan.serve.served_model_name
    name = adapter or base
    return {
        "name": name,
        "model": name,
        "modified_at": _started(),
        "size": core.facts.weight_bytes,
        "digest": hashlib.sha256(orjson.dumps([dict(core.facts.config), adapter])).hexdigest(),
        "details": _details(core, base if adapter else ""),
    }


def _details(core: EngineCore, parent: str = "") -> dict[str, Any]:
    family = _family(core)
    return {
        "parent_model": parent,
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _size_words(_num_parameters(core)),
        "quantization_level": core.plan.model.quantization or core.facts.dtype,
    }


def _capabilities(core: EngineCore) -> list[str]:
    text = core.plan.tokenizer
    tools = ["tools"] if text.tool_call_parser is not None else []
    vision = ["vision"] if takes_kind(core, "image") else []
    return ["completion", *vision, *tools, *(["thinking"] if text.reasoning_parser is not None else [])]


def _family(core: EngineCore) -> str:
    return str(core.facts.config.get("model_type") or core.facts.architecture)


def _num_parameters(core: EngineCore) -> int:
    """Estimate the number of parameters from the size of the weights on disk."""
    return core.facts.weight_bytes // _BYTES.get(core.facts.dtype, 2)


def _size_words(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def _started() -> str:
    return datetime.fromtimestamp(STARTED_S, UTC).isoformat().replace("+00:00", "Z")
