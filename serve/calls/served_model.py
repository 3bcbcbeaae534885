"""The served model and its adapters, and the names by which calls can refer to them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from runtime.errors import InvalidRequest, NotFound
from runtime.request import Request
from serve.calls.prompts import spread

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


ANY_MODEL = "default"  # a name that clients send if they do not choose a model
STARTED_S = int(time.time())


class ServedModel(NamedTuple):
    """The model that answers a call: the base model, or the base model with an adapter."""

    name: str  # the name that the answer shows
    adapter: str | None = None  # name of the LoRA adapter


def choose_model(core: EngineCore, model: str | None) -> ServedModel:
    """Return the model of a call. With LoRA, `model` may be "ADAPTER" or "BASE:ADAPTER".

    Raises `NotFound` for a model that is not served here.
    """
    name = core.plan.serve.served_model_name if model is None else model
    adapter = None if model is None else _adapter_of(core, model)
    if adapter is None:
        check_model(core, model)
    return ServedModel(name, adapter)


def adapters_of(model: ServedModel, lora_path: str | list[str | None] | None, count: int) -> list[str | None]:
    """Return the adapter name, or None, of each of `count` prompts, from `model` and `lora_path` ("" means None).

    Raises `InvalidRequest` if `model` and `lora_path` name different adapters.
    """
    adapters = [name or model.adapter for name in spread(lora_path, count, "lora_path")]
    if model.adapter is not None and any(name != model.adapter for name in adapters):
        raise InvalidRequest("model and lora_path name different adapters; send one of them.", param="lora_path")
    return adapters


def check_model(core: EngineCore, model: str | None) -> None:
    """Raise `NotFound` if `model` is not a name of the base model, unless the server ignores model names."""
    if model is not None and not core.plan.serve.ignore_model_name and model not in (*_base_names(core), ANY_MODEL):
        raise NotFound(missing(core, model), param="model")


def with_adapter(requests: Sequence[Request], adapter: str | None) -> list[Request]:
    """Return the requests with this LoRA adapter, or unchanged if it is None."""
    return [replace(request, lora=adapter) for request in requests] if adapter is not None else list(requests)


def _base_names(core: EngineCore) -> tuple[str, ...]:
    return core.plan.serve.served_model_name, core.plan.model.path, core.facts.path


def _adapter_of(core: EngineCore, model: str) -> str | None:
    """Return the adapter that `model` names, or None. Raises `NotFound` for an unknown adapter of the base model."""
    adapters = core.adapters
    if not adapters.enabled or model in _base_names(core):
        return None
    if adapters.knows(model):
        return model
    base, colon, name = model.rpartition(":")
    if not colon or base not in _base_names(core):
        return None
    if not adapters.knows(name):
        raise NotFound(missing(core, model), param="model")
    return name


def missing(core: EngineCore, model: str) -> str:
    return f"The model '{model[:200]}' does not exist; this server has '{core.plan.serve.served_model_name}'."
