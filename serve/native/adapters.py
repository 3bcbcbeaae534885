"""Load and unload LoRA adapters while requests run, in the formats of SGLang and vLLM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp

from runtime.errors import InvalidRequest
from serve.calls.adapters import (
    LoadAdapterBody,
    LoadAdapterFromTensorsBody,
    LoadAdapterInPlaceBody,
    UnloadAdapterBody,
    adapters_answer,
    load_adapter,
    load_adapter_from_tensors,
    tensors_of,
)
from serve.calls.body import parse_object
from serve.http.endpoint import decodes, json_response, read_as, read_body
from serve.http.errors import describe, native_body

if TYPE_CHECKING:
    from runtime.actors.engine_core import EngineCore


@decodes(LoadAdapterBody)
async def load(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Load a LoRA adapter from a folder on the server's machine.

    Answers when all ranks have loaded the adapter, or with 400 and the reason in `error_message` if loading failed.
    """
    try:
        body = await read_as(http, LoadAdapterBody)
        await load_adapter(core, body.lora_name, body.lora_path, pinned=body.pinned)
    except InvalidRequest as error:
        return _refused(core, error)
    return json_response(adapters_answer(core))


@decodes(LoadAdapterFromTensorsBody)
async def load_tensors(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Load a LoRA adapter whose tensors are in the body, as safetensors data in base64. Pickle is refused."""
    try:
        body, tensors = await read_body(http, lambda raw: tensors_of(parse_object(raw)))
        await load_adapter_from_tensors(core, body.lora_name, body.config_dict, tensors, pinned=body.pinned)
    except InvalidRequest as error:
        return _refused(core, error)
    return json_response(adapters_answer(core))


@decodes(UnloadAdapterBody)
async def unload(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Unload a LoRA adapter. Running requests with this adapter finish; the answer waits for them, at most a minute."""
    try:
        body = await read_as(http, UnloadAdapterBody)
        await core.adapters.unload(body.lora_name)
    except InvalidRequest as error:
        return _refused(core, error)
    return json_response(adapters_answer(core))


@decodes(LoadAdapterInPlaceBody)
async def load_in_place(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Load a LoRA adapter from a folder on the server's machine, as in vLLM.

    `load_inplace`: replace an adapter of the same name.
    """
    body = await read_as(http, LoadAdapterInPlaceBody)
    await load_adapter(core, body.lora_name, body.lora_path, replace=body.load_inplace)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@decodes(UnloadAdapterBody)
async def unload_named(http: HttpRequest, core: EngineCore) -> ASGIApp:
    """Unload a LoRA adapter, as in vLLM. Running requests with this adapter finish."""
    body = await read_as(http, UnloadAdapterBody)
    await core.adapters.unload(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _refused(core: EngineCore, error: InvalidRequest) -> ASGIApp:
    return json_response({**native_body(describe(error)), **adapters_answer(core, error.message)}, 400)
