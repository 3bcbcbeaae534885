"""The one model that is served, as Ollama lists and describes models."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp

from runtime.errors import InvalidRequest, NotFound
from serve.endpoint import decode_open, json_response, parse_object, read_body
from serve.ollama.schema import ShowBody
from serve.openai.models import STARTED_S, check_model

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore

API_VERSION = "0.13.0"  # the Ollama whose API this is; clients refuse versions that they find too old
LATEST = ":latest"
NEVER = "2318-01-01T00:00:00Z"  # when the model leaves memory
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def served_name(core: EngineCore, model: str) -> str:
    """The name to answer with; Ollama's clients may add `:latest`. Raises `NotFound`."""
    try:
        return check_model(core, model)
    except NotFound:
        if model.endswith(LATEST):
            check_model(core, model.removesuffix(LATEST))
            return model
        raise


async def version(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """The version, as Ollama says it."""
    return json_response({"version": API_VERSION})


async def tags(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """The models that there are: one."""
    return json_response({"models": [_card(core)]})


async def running(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """The models in memory: the same one."""
    on_gpu = core.plan.model.device != "cpu"
    card = {
        **_card(core),
        "expires_at": NEVER,
        "size_vram": core.facts.weight_bytes if on_gpu else 0,
        "context_length": core.plan.model.context_length,
    }
    return json_response({"models": [card]})


async def show(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """What is known of the model."""
    return json_response(await read_body(http, partial(_show, core)))


def _show(core: EngineCore, raw: bytes) -> dict[str, Any]:
    body = decode_open(ShowBody, parse_object(raw), core, "/api/show")
    model = body.model or body.name
    if model is None:
        raise InvalidRequest("model is required.", param="model")
    served_name(core, model)
    facts, kind = core.facts, _family(core)
    template = core.tokenizer.template if core.tokenizer is not None else None
    preferred = {**facts.preferred_sampling, **core.plan.serve.preferred_sampling}
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


def _card(core: EngineCore) -> dict[str, Any]:
    name = core.plan.serve.served_model_name
    return {
        "name": name,
        "model": name,
        "modified_at": _started(),
        "size": core.facts.weight_bytes,
        "digest": hashlib.sha256(orjson.dumps(dict(core.facts.config))).hexdigest(),
        "details": _details(core),
    }


def _details(core: EngineCore) -> dict[str, Any]:
    family = _family(core)
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _size_words(_num_parameters(core)),
        "quantization_level": core.plan.model.quantization or core.facts.dtype,
    }


def _capabilities(core: EngineCore) -> list[str]:
    text = core.plan.tokenizer
    tools = ["tools"] if text.tool_call_parser is not None else []
    return ["completion", *tools, *(["thinking"] if text.reasoning_parser is not None else [])]


def _family(core: EngineCore) -> str:
    return str(core.facts.config.get("model_type") or core.facts.architecture)


def _num_parameters(core: EngineCore) -> int:
    """By the bytes on disk."""
    return core.facts.weight_bytes // _BYTES.get(core.facts.dtype, 2)


def _size_words(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def _started() -> str:
    return datetime.fromtimestamp(STARTED_S, UTC).isoformat().replace("+00:00", "Z")
